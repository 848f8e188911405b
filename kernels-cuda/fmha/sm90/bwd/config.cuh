// The Hopper backward kernel's derived numbers, shared memory, barriers and roles.
#pragma once
#include <fmha/common/pipeline.cuh>
#include <fmha/mma/sm90.cuh>
#include <fmha/params.h>
#include <fmha/ptx/cluster.cuh>
#include <fmha/ptx/mbarrier.cuh>
#include <fmha/ptx/tma.cuh>
#include <fmha/common/quads.cuh>
#include <fmha/sm90_bwd_host.h>

namespace fmha::sm90::bwd {

namespace mma = fmha::mma::sm90;

using fmha::mma::SmemTile;
using fmha::mma::Storage;
using ptx::Barrier;
using ptx::TensorMap;

// Properties that follow from a tile's walk, path and finish of dQ; the rules are the host's (sm90_bwd_host.h).
FMHA_DEVICE consteval bool splits_dims(const Sm90BwdTile& tile) { return splits_dims(tile.walk); }
FMHA_DEVICE consteval bool halves_blocks(const Sm90BwdTile& tile) { return tile.walk == BwdWalk::HalfBlocks; }
FMHA_DEVICE consteval bool starts_dp_late(const Sm90BwdTile& tile) { return tile.walk == BwdWalk::LateDp; }
FMHA_DEVICE consteval bool has_gradient_each(const Sm90BwdTile& tile) { return tile.walk == BwdWalk::GradientEach; }
FMHA_DEVICE consteval int cluster_size(const Sm90BwdTile& tile) { return cluster(tile.walk); }
FMHA_DEVICE consteval bool in_clusters(const Sm90BwdTile& tile) { return cluster_size(tile) > 1; }
// Rank of this CTA in its cluster, whose CTAs have neighbouring key blocks of one head. Each adds its share of dQ's
// dimension for both, from both CTAs' dS, so that half as many bytes are added; and each loads half of the rows of Q
// and dO for both.
template <Sm90BwdTile tile>
FMHA_DEVICE int32_t cluster_rank() {
  return in_clusters(tile) ? blockIdx.x % cluster_size(tile) : 0;
}
FMHA_DEVICE consteval int cluster_keys(const Sm90BwdTile& tile) { return tile.block_n * cluster_size(tile); }
// Number of queries in a consumer's fragment of S^T.
FMHA_DEVICE consteval int num_columns(const Sm90BwdTile& tile) {
  return tile.block_m / (splits_dims(tile) ? num_consumers(tile) : halves_blocks(tile) ? 2 : 1);
}
FMHA_DEVICE consteval int num_consumer_threads(const Sm90BwdTile& tile) {
  return mma::kWarpgroup * num_consumers(tile);
}
FMHA_DEVICE consteval int num_consumer_warps(const Sm90BwdTile& tile) { return 4 * num_consumers(tile); }

// Registers per thread of the consumers after setmaxnreg; over all roles they sum to the file's 64 K.
FMHA_DEVICE consteval int consume_regs(const Sm90BwdTile& tile) {
  return (504 - tile.load_registers) / num_consumers(tile);
}

// Head dimension of Q, K and V in the tiles: TMA fills the part beyond the tensors with zeros.
FMHA_DEVICE consteval int padded_dim(const FwdSpec& spec) {
  const int dim = max(spec.head_dim_qk, spec.head_dim_v);
  return round_up(dim, 64);
}

// A tile for clusters, where a shared-memory address is no compile-time constant. The compiler computes a product's
// descriptors from it in every step: kept in registers between steps they spilled some 40 registers.
template <class Elem, int rows, int dim, bool clustered>
struct BwdTile : SmemTile<Elem, rows, dim, clustered> {
  FMHA_DEVICE uint32_t offset() const {
    const uint32_t offset = SmemTile<Elem, rows, dim, clustered>::offset();
    return clustered ? ptx::made_here(offset) : offset;
  }
};

// Tensor maps of the main kernel, with dimensions `(dim, row, head, batch)`.
struct Maps {
  TensorMap q, k, v, dout;
  TensorMap o;  // where delta is made beside the products
};

// How two consumers divide dQ's columns where the head dimension is more than two chunks of 64 and at most three: each
// has a chunk, and half of the columns of the third. A product's columns must lie in one chunk or begin one.
template <int dim>
struct ThreeChunks {
  static constexpr int whole = 64, half = dim / 2 - whole;
  FMHA_DEVICE static constexpr int32_t first_of_whole(int32_t consumer) { return whole * consumer; }
  FMHA_DEVICE static constexpr int32_t first_of_half(int32_t consumer) { return 2 * whole + half * consumer; }
};

template <BwdSpec spec, Sm90BwdTile tile>
struct Shape {
  static constexpr DType dtype = spec.fwd.dtype_qk;
  static constexpr int dim = padded_dim(spec.fwd);
  static constexpr int consumers = num_consumers(tile);
  // Head dimensions that products compute: rounded up to their steps of 16.
  static constexpr int dim_qk = round_up(spec.fwd.head_dim_qk, 16), dim_v = round_up(spec.fwd.head_dim_v, 16);
  // Columns of V in shared memory: padded to those of Q and K, or V's own if there is no room.
  static constexpr int v_columns = halves_blocks(tile) ? round_up(spec.fwd.head_dim_v, 64) : dim;
  // Columns of dK and dV of one consumer. Where a consumer has only one of the two gradients, `dk_columns` counts
  // that gradient's.
  static constexpr bool gradient_each = has_gradient_each(tile);
  static constexpr int dk_columns = gradient_each ? max(dim_qk, dim_v) : splits_dims(tile) ? dim / consumers : dim_qk;
  static constexpr int dv_columns = gradient_each ? 0 : splits_dims(tile) ? dim / consumers : dim_v;
  // Number of columns of the sums of dQ.
  static constexpr int dq_dim = halves_blocks(tile) ? dim_qk : dim;
  // Consumers share out dQ of a query block by its columns (64 each, as the transpose of dQ, or half each) or by its
  // rows. With three chunks of 64 columns, the first consumers of two CTAs have one chunk each; the second consumers
  // of both multiply the whole third chunk, and each adds half of it.
  static constexpr bool transposes_dq = dim == kTransposedDqDim;
  static constexpr bool dq_by_columns = splits_dims(tile) || halves_blocks(tile);
  static constexpr int dq_columns = gradient_each   ? mma::kRows
                                    : transposes_dq ? tile.block_m
                                                    : dq_dim / (dq_by_columns ? consumers * cluster_size(tile) : 1);
  static constexpr int dq_rows = transposes_dq ? dim : dq_by_columns ? tile.block_m * consumers : tile.block_m;
  // Number of f32 sums in one consumer's share of dQ, and in a whole query block.
  static constexpr int dq_share = mma::kRows * dq_columns;
  // Number of f32 sums of its share that a consumer adds to memory. Of the third chunk it adds only the half that
  // belongs to its CTA.
  FMHA_DEVICE static constexpr int dq_added(int32_t consumer) { return gradient_each && consumer == 1 ? dq_share / 2 : dq_share; }
  FMHA_DEVICE static int32_t share_of(int32_t consumer) {
    if constexpr (gradient_each) return consumer == 0 ? cluster_rank<tile>() : dq_shares - 1;
    return cluster_rank<tile>() * consumers + consumer;
  }
  static constexpr int dq_shares = gradient_each ? dim / dq_columns : consumers * cluster_size(tile);
  static constexpr int dq_block = dq_share * dq_shares;
  static constexpr int cluster_columns = round_up(dim / cluster_size(tile), 64);  // of a CTA's share of dQ
  using Chunks = ThreeChunks<dq_dim>;
  static_assert(!halves_blocks(tile) || (dq_columns == Chunks::whole + Chunks::half && Chunks::half > 0),
                "in parts, three chunks of dQ");
  // First column of a consumer's dK and dV.
  FMHA_DEVICE static int32_t first_column(int32_t consumer) {
    return splits_dims(tile) && !gradient_each ? consumer * dk_columns : 0;
  }
  // Whether the accumulator that the code calls a consumer's dK holds dV.
  FMHA_DEVICE static bool has_dv(int32_t consumer) { return gradient_each && consumer == 1; }

  using Elem = Storage<dtype>;
  template <int rows, int columns>
  using Tile = BwdTile<Elem, rows, columns, in_clusters(tile)>;
  using QTile = Tile<tile.block_m, dim>;
  using KTile = Tile<tile.block_n, dim>;
  using VTile = Tile<tile.block_n, v_columns>;
  using DoutTile = Tile<tile.block_m, v_columns>;
  using DsTile = Tile<tile.block_m, tile.block_n>;
  using OtherKTile = Tile<tile.block_n, cluster_columns>;
};

// Data that a CTA holds for the cluster's other CTA.
template <BwdSpec spec, Sm90BwdTile tile, bool = in_clusters(tile)>
struct ClusterSmem {};
template <BwdSpec spec, Sm90BwdTile tile>
struct ClusterSmem<spec, tile, true> {
  using S = Shape<spec, tile>;
  typename S::OtherKTile other_k;  // columns of its K, of this CTA's share of dQ
  typename S::DsTile other_ds[tile.stages_ds];
};

// Results of the dropout generator's first rounds, in shared memory, one set a warp: those of the warp's sixteen keys,
// which serve every query of a head, and those of the block's queries, which serve every key. At D 64, 128 queries a
// block, causal 292 to 299 TFLOP/s; at D 128, whose products leave less of shared memory's bandwidth, 410 to 391, and
// with the keys' part alone 400.
template <int queries>
struct alignas(16) DropoutParts {
  Array<uint32_t, 4> quads[4];
  Array<uint32_t, 2> rows[queries];
};
template <BwdSpec spec, Sm90BwdTile tile>
FMHA_DEVICE constexpr bool keeps_dropout_parts() {
  return spec.fwd.dropout && starts_dp_late(tile);
}
template <BwdSpec spec, Sm90BwdTile tile, bool = keeps_dropout_parts<spec, tile>()>
struct DropoutSmem {};
template <BwdSpec spec, Sm90BwdTile tile>
struct DropoutSmem<spec, tile, true> {
  DropoutParts<tile.block_m> dropout_parts[num_consumer_warps(tile)];
};

template <BwdSpec spec, Sm90BwdTile tile, bool = has_one_probs(tile)>
struct OneProbsSmem {};
template <BwdSpec spec, Sm90BwdTile tile>
struct OneProbsSmem<spec, tile, true> {
  typename Shape<spec, tile>::DsTile one_probs;
};

// Sums of a query block whose dQ is being finished, in the layout of `Smem::dq`; or O and dO of a block whose delta is
// being computed.
template <BwdSpec spec, Sm90BwdTile tile, bool = finishes_dq(tile)>
struct FinishSmem {};
template <BwdSpec spec, Sm90BwdTile tile>
struct FinishSmem<spec, tile, true> {
  using Rows = typename Shape<spec, tile>::DoutTile;
  union {
    alignas(1024) float sums[Shape<spec, tile>::consumers][Shape<spec, tile>::dq_share];
    struct {
      Rows rows_of_o, rows_of_dout;
    };
  };
};

template <BwdSpec spec, Sm90BwdTile tile>
struct Smem : ClusterSmem<spec, tile>, DropoutSmem<spec, tile>, OneProbsSmem<spec, tile>, FinishSmem<spec, tile> {
  using S = Shape<spec, tile>;
  typename S::KTile k;
  typename S::VTile v;
  typename S::QTile q[tile.stages_q];
  typename S::DoutTile dout[tile.stages_dout];
  typename S::DsTile ds[tile.stages_ds][splits_dims(tile) && !has_one_probs(tile) ? 2 : 1];  // dS; and P where shared
  FMHA_DEVICE const typename S::DsTile& probs(int32_t slot) const {
    if constexpr (has_one_probs(tile)) {
      return this->one_probs;
    } else {
      return ds[slot][1];
    }
  }
  // Sums of dQ in the order of the accumulators: [element / 4][thread][4]. The array is empty where consumers add to
  // global memory from registers.
  alignas(1024) float dq[adds_from_registers(tile) ? 1 : (S::consumers - 1) * S::dq_share + S::dq_added(S::consumers - 1)];
  alignas(1024) float lse_log2[tile.stages_q][tile.block_m];
  float delta[tile.stages_dout][tile.block_m];
  Barrier k_full;    // the bytes of a key block's K
  Barrier v_full;    // and of its V
  Barrier kv_empty;  // one arrival per consumer warp: the key block is done
  Barrier q_full[tile.stages_q];         // the bytes of Q, and of its rows' LSE
  Barrier q_empty[tile.stages_q];        // one arrival per consumer warp of the cluster
  Barrier dout_full[tile.stages_dout];   // the bytes of dO, and of its rows' delta
  Barrier dout_empty[tile.stages_dout];  // one arrival per consumer warp of the cluster
  Barrier other_ds_full[tile.stages_ds];   // the bytes of the other CTA's dS
  Barrier other_ds_empty[tile.stages_ds];  // one arrival per consumer warp there: what this CTA sent has been used
  Barrier probs_empty;  // one arrival per warp of the consumer of dV: a block's P have been read
  // One arrival per warp of the consumer: its share is in `dq`; of DqPath::Registers, it has issued its additions.
  Barrier dq_full[S::consumers];
  // The store role's arrival: the share has been read. Of DqPath::Registers, of the first one the polling thread's:
  // the consumers may add to the block.
  Barrier dq_empty[S::consumers];
  Barrier sums_full;                     // the bytes of `sums`
  Barrier dq_admitted;                   // the polling thread's arrival: the store role may store or add the next block
  Barrier dq_added;                      // the store role's arrival: what it has added to a block is in memory
  Barrier dq_added_seen;                 // the releasing thread's arrival: it has waited for `dq_added`
  Barrier tile_index_full[kTileIndexSlots];   // the load role's arrival: the next tile's index is there
  // One arrival per consumer warp and per thread of `kNumDqThreads`; in a cluster's first CTA one more, by the other
  // CTA's load role once all of these have arrived there.
  Barrier tile_index_empty[kTileIndexSlots];
  int32_t tile_index[kTileIndexSlots];
  int32_t dq_is_first;  // beside `dq_admitted`, or `dq_empty[0]`: nothing has been added to the block yet
};

// Threads of the loading warpgroup that store dQ, or poll or release its semaphores (dq/).
template <BwdSpec spec, Sm90BwdTile tile>
constexpr int kNumDqThreads = keeps_dq_apart(tile)        ? (adds_from_registers(tile) ? 0 : 1)
                            : adds_from_registers(tile) ? (spec.deterministic ? 1 : 0)
                            : spec.deterministic        ? 3
                            : tile.dq_path == DqPath::FirstStores ? 2
                                                                  : 1;

// Named barriers; 0 is that of __syncthreads.
constexpr int kConsumersBarrier = 1;

}  // namespace fmha::sm90::bwd
