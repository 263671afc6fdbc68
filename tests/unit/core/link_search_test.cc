// The search for a bad link: it is found whatever it is, in about as many tests
// as the logarithm of the number of links, compared with a list of all links.
#include "coordinator/core/link_search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace remesh::core {
namespace {

using Hosts = std::set<std::string>;

Hosts first_hosts(int n) {
  Hosts out;
  for (int i = 0; i < n; ++i) out.insert("h" + std::to_string(100 + i));
  return out;
}

bool has(const Hosts& hosts, const Link& link) {
  return hosts.contains(link.first) && hosts.contains(link.second);
}

std::vector<Link> links_of(const Hosts& hosts) {
  std::vector<Link> out;
  for (const std::string& a : hosts)
    for (const std::string& b : hosts)
      if (a < b) out.emplace_back(a, b);
  return out;
}

Hosts of_test(const Hosts& hosts, const pb::LinkSearch& s) {
  Hosts out;
  for (const std::string& h : hosts)
    if (!is_apart(s, h)) out.insert(h);
  return out;
}

TEST(LinkSearch, FindsAnyLinkInAboutTheLogarithmOfTheirNumber) {
  for (const int n : {3, 4, 5, 7, 8, 12, 16}) {
    const Hosts hosts = first_hosts(n);
    const auto most = 2 + 2 * static_cast<int>(std::ceil(std::log2(n)));
    for (const Link& bad : links_of(hosts)) {
      pb::LinkSearch s = begin_link_search(hosts);
      std::vector<Link> twin = links_of(hosts);  // in question
      int tests = 0;
      while (!found_link(s) && tests <= most) {
        ++tests;
        ASSERT_TRUE(set_apart([](const Hosts&) { return true; }, {}, &s));
        const Hosts mesh = of_test(hosts, s);
        const bool passed = !has(mesh, bad);
        narrow(mesh, passed, &s);
        std::erase_if(twin,
                      [&](const Link& l) { return has(mesh, l) == passed; });
        EXPECT_EQ(num_links(s), twin.size()) << link_text(s);
      }
      EXPECT_LE(tests, most) << n << " hosts";
      EXPECT_EQ(found_link(s), bad);
    }
  }
}

// A host may die, join or be needed: then a mesh is another one than planned.
TEST(LinkSearch, NoMeshMakesItMissTheLink) {
  const Hosts hosts = first_hosts(6);
  for (const Link& bad : links_of(hosts))
    for (int first = 1; first < 64; ++first)
      for (int second = 1; second < 64; ++second) {
        pb::LinkSearch s = begin_link_search(hosts);
        for (const int which : {first, second}) {
          Hosts mesh;
          int i = 0;
          for (const std::string& h : hosts)
            if ((which >> i++ & 1) != 0) mesh.insert(h);
          narrow(mesh, !has(mesh, bad), &s);
        }
        const Hosts ends(s.ends().begin(), s.ends().end());
        const Hosts others(s.others().begin(), s.others().end());
        ASSERT_TRUE((ends.contains(bad.first) && others.contains(bad.second)) ||
                    (ends.contains(bad.second) && others.contains(bad.first)))
            << bad.first << " " << bad.second << " " << first << " " << second;
      }
}

TEST(LinkSearch, LeavesOutOnlyHostsThatTheJobCanRunWithout) {
  pb::LinkSearch s = begin_link_search(first_hosts(8));
  EXPECT_TRUE(set_apart(
      [](const Hosts& apart) { return apart == Hosts{"h105"}; }, {}, &s));
  EXPECT_EQ(std::vector<std::string>(s.apart().begin(), s.apart().end()),
            std::vector<std::string>{"h105"});
  EXPECT_FALSE(set_apart([](const Hosts&) { return false; }, {}, &s));
  EXPECT_TRUE(s.apart().empty());
}

TEST(LinkSearch, AMeshOfAllHostsThatWorksShowsThatNoneIsBad) {
  pb::LinkSearch s = begin_link_search(first_hosts(5));
  EXPECT_EQ(num_links(s), 10U);
  narrow(first_hosts(5), /*passed=*/true, &s);
  EXPECT_EQ(num_links(s), 0U);
}

TEST(LinkSearch, DescribesWhatIsKnown) {
  pb::LinkSearch s = begin_link_search({"a", "b", "c"});
  EXPECT_EQ(link_text(s), "between two of the hosts a, b, c");
  narrow({"a", "b"}, /*passed=*/true, &s);
  EXPECT_EQ(link_text(s), "between host c and one of a, b");
  narrow({"a", "c"}, /*passed=*/false, &s);
  EXPECT_EQ(link_text(s), "between hosts a and c");
}

}  // namespace
}  // namespace remesh::core
