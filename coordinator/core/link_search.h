// The search for a bad link between two of many hosts. When a collective hangs,
// every rank waits and nobody knows between which two hosts a message was lost.
// Meshes without some of the hosts tell: those that hang have the link, those
// that make a step do not have it. Each test leaves about half of the pairs of
// hosts, so that n hosts take about 2 log2(n) tests (group testing of one edge:
// Aigner, Combinatorial Search, 1988).
//
// Functions of pb::LinkSearch, which the journal keeps. Pure.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>

#include "coordinator/core/cause.h"
#include "proto/control.pb.h"

namespace remesh::core {

// The link is between two of these hosts.
pb::LinkSearch begin_link_search(const std::set<std::string>& hosts);

// A mesh with ranks on these hosts made a step, or hung.
void narrow(const std::set<std::string>& hosts, bool passed,
            pb::LinkSearch* search);

// How many pairs it may be. 0: of those that were known none is bad, or it is
// not always bad.
size_t num_links(const pb::LinkSearch& search);
// The link, if it is known.
std::optional<Link> found_link(const pb::LinkSearch& search);

// Chooses the hosts that get no ranks in the next test: search->apart(). `can`:
// whether the job can run without these hosts. unproven: those to begin with.
// False if it can run without none of them; then nobody is set apart.
bool set_apart(const std::function<bool(const std::set<std::string>&)>& can,
               const std::set<std::string>& unproven, pb::LinkSearch* search);

bool in_question(const pb::LinkSearch& search, const std::string& host);
bool is_apart(const pb::LinkSearch& search, const std::string& host);

// "between hosts a and b", or "between two of the hosts a, b, c".
std::string link_text(const pb::LinkSearch& search);
// Why a host is set apart, for people.
std::string search_text(const pb::LinkSearch& search);

}  // namespace remesh::core
