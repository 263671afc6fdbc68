// Closes the listening sockets of libraries to those they are not meant for.
//
// PMIx believes the user id that a client claims, and Open MPI believes any
// client; both listen for every user of the host, Open MPI on all addresses.
// Neither can be told otherwise, so this library has a bind() and an accept()
// of its own, which take precedence over those of the C library in programs
// that link it (ELF symbol interposition). Until guard_sockets() they do what
// those do.
#pragma once

namespace remesh {

// Environment variable: the IPv4 and IPv6 addresses to listen on,
// comma-separated.
inline constexpr char kListenVariable[] = "REMESH_LISTEN";

// Environment variable: an IPv6 CIDR.
inline constexpr char kPeersVariable[] = "REMESH_PEERS";

// From now on, in this process:
//   - accept() drops TCP connections that another user of this host has opened,
//     according to the kernel's table of sockets. It cannot know the user of a
//     connection from another host.
//   - If REMESH_PEERS is set, accept() also drops TCP connections from
//     addresses outside of it. A host accepts packets for an address of one
//     interface on the others, too.
//   - If REMESH_LISTEN is set, bind() to all addresses of the host binds the
//     address of the same family there, or loopback if it has none. If it has
//     several, accept() drops connections to other ones.
void guard_sockets();

}  // namespace remesh
