// Which output tiles a cluster computes, in which order.
//
// A cluster of two CTAs computes pairs of tiles of one expert. The two tiles of a pair lie in the same columns, one
// below the other, and share the b operand; the last row of an odd number of tiles is paired side by side and shares a.
// What is shared each CTA loads half of, into both.
#pragma once

#include "hopper.cuh"

namespace moe_ops {

enum class Form { kForward, kDgrad, kWgrad };

constexpr int kTileM = 128;
constexpr int kTileN = 256;
constexpr int kTileK = 64;
constexpr int kRagged = 1 << 30;  // row dimension of a ragged map: see maps.h

struct Groups {
  const int* offsets;  // [num_experts] inclusive ends of the experts' rows
  int num_experts;
  int num_rows;  // C
  int m_size;    // O of a wgrad; else unused: M is the expert's rows
  int n_tiles;
};

constexpr int kNoExpert = -1;

struct Tile {
  int expert;               // kNoExpert: after the last tile
  int first_row, num_rows;  // of the expert
  int m, n;                 // index of the tile among the expert's
  bool shares_b;
};

template <Form kForm>
class TileWalk {
 public:
  __device__ explicit TileWalk(const Groups& groups) : groups_(groups) { load_window(); }

  // This CTA's tile of the pair at `position`, which must not decrease; the same for all lanes of a warp. False after
  // the last.
  __device__ bool find(int position, Tile& tile) {
    while (window_ < groups_.num_experts) {
      const int pair = position - window_position_;
      const unsigned ends_after = __ballot_sync(kAllLanes, pairs_before_ + pairs_ > pair);
      if (ends_after) {
        pick(tile, pair, __ffs(ends_after) - 1);
        return true;
      }
      window_position_ += __shfl_sync(kAllLanes, pairs_before_ + pairs_, kLanes - 1);
      window_ += kLanes;
      load_window();
    }
    return false;
  }

 private:
  static constexpr unsigned kAllLanes = hopper::kAllLanes;
  static constexpr int kLanes = 32;
  static constexpr int kGroupOfPairs = 8;  // rows of pairs that share the b tiles in the L2 cache

  __device__ int row_end(int expert) const { return min(max(groups_.offsets[expert], 0), groups_.num_rows); }

  // Lane i looks after expert window_ + i.
  __device__ void load_window() {
    const int lane = threadIdx.x % kLanes;
    const int expert = window_ + lane;
    first_row_ = rows_ = pairs_ = 0;
    if (expert < groups_.num_experts) {
      first_row_ = expert == 0 ? 0 : row_end(expert - 1);
      rows_ = max(row_end(expert) - first_row_, 0);
      const int m_tiles = num_m_tiles(rows_);
      pairs_ = m_tiles / 2 * groups_.n_tiles + m_tiles % 2 * ((groups_.n_tiles + 1) / 2);
    }
    int sum = pairs_;
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int left = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += left;
    }
    pairs_before_ = sum - pairs_;
  }

  __device__ int num_m_tiles(int rows) const {
    return ((kForm == Form::kWgrad ? groups_.m_size : rows) + kTileM - 1) / kTileM;
  }

  __device__ void pick(Tile& tile, int pair, int lane) const {
    pair -= __shfl_sync(kAllLanes, pairs_before_, lane);
    tile.expert = window_ + lane;
    tile.first_row = __shfl_sync(kAllLanes, first_row_, lane);
    tile.num_rows = __shfl_sync(kAllLanes, rows_, lane);
    const int m_tiles = num_m_tiles(tile.num_rows);
    const int m_pairs = m_tiles / 2;
    const int rank = hopper::cluster_rank();
    tile.shares_b = pair < m_pairs * groups_.n_tiles;
    if (tile.shares_b) {
      const int first = pair / (kGroupOfPairs * groups_.n_tiles) * kGroupOfPairs;
      const int size = min(kGroupOfPairs, m_pairs - first);
      pair -= first * groups_.n_tiles;
      tile.m = 2 * (first + pair % size) + rank;
      tile.n = pair / size;
    } else {
      tile.m = m_tiles - 1;
      tile.n = 2 * (pair - m_pairs * groups_.n_tiles) + rank;  // may lie past the last: zeros, and nothing stored
    }
  }

  const Groups& groups_;
  int window_ = 0, window_position_ = 0;
  int first_row_, rows_, pairs_, pairs_before_;
};

}  // namespace moe_ops
