// What is done between the message of a failed CHECK and the end of the
// process.
#pragma once

namespace remesh {

// Called once, in the failing thread. Replaces the previous hook.
void before_check_aborts(void (*hook)());

}  // namespace remesh
