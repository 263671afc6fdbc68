// Who may use the files of a run: its user alone, or also a group.
#pragma once

#include <string>
#include <string_view>

#include "proto/base/status.h"

namespace remesh {

// Sets the umask of this process and of its later children: what they create is
// accessible to the user alone or, with a group, to its members too. NotFound
// if there is no such group. Call this before any thread is started.
Status share_new_files(const std::string& group);
// Creates the folder and gives it to the group, and with it everything that is
// created in it later. Does nothing for "".
Status give_to_group(const std::string& folder, const std::string& group);
// Creates a file that its user alone may use, whatever the umask, and syncs it.
// AlreadyExists if there is one. A failure leaves none.
Status create_private_file(const std::string& path, std::string_view bytes);

}  // namespace remesh
