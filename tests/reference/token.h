// What the three recurrences have in common: the shape of a layer and the inputs of one token.
#pragma once

#include <cstddef>
#include <vector>

namespace ssmd::reference {

// Heads of a key group are adjacent.
struct Shape {
  size_t head_count = 0;
  size_t key_group_count = 0;
  size_t d_k = 0;
  size_t d_v = 0;
  size_t GroupOf(size_t head) const { return head / (head_count / key_group_count); }
};

struct Token {
  std::vector<double> q;            // [key_group][d_k]
  std::vector<double> k;            // [key_group][d_k]
  std::vector<double> v;            // [head][d_v]
  std::vector<double> log_alpha;    // [head], KDA [head][d_k]
  std::vector<double> beta;         // [head]; GDN and KDA
  std::vector<double> value_scale;  // [head]; Mamba-2
};

}  // namespace ssmd::reference
