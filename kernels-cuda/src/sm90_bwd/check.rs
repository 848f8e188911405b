//! Checks of whether a tile can be compiled for a spec, and why not.

use fmha_core::fields::FieldValue as _;
use fmha_core::spec::BwdSpec;
use fmha_core::{DType, MaskKind};

use super::spec::{own_width, padded_dim};
use super::tile::{SPLIT_QUERIES, Sm90BwdTile, transposes_dq};
use super::walk::{BwdWalk, DqPath};

/// Most registers of a consumer's accumulators: the rest of the thread's registers is needed for other values.
const MAX_ACCUMULATORS: i32 = 216;

impl Sm90BwdTile {
    /// Checks that the tile can be compiled for a spec.
    ///
    /// # Errors
    /// The first field that does not fit, with its number.
    pub fn check(&self, spec: &BwdSpec) -> Result<(), String> {
        self.check_walk(spec)?;
        self.check_way_of_dq(spec)?;
        self.check_roles()?;
        self.check_stages(spec)?;
        self.check_shares(spec)
    }

    /// Checks the head dimensions and the number of keys for the tile's loop over query blocks.
    fn check_walk(&self, spec: &BwdSpec) -> Result<(), String> {
        let dim = padded_dim(spec);
        let Self { block_m, block_n, .. } = *self;
        if block_m < 16 || block_m % 16 != 0 || block_m > 256 {
            return Err(format!("block_m {block_m} is not a multiple of 16 from 16 to 256"));
        }
        let walk = self.walk;
        let (set, v) = (walk.name(), spec.fwd.head_dim_v);
        let takes_dims = match walk {
            BwdWalk::InOrder | BwdWalk::LateDp | BwdWalk::EarlyScores => dim <= 128,
            BwdWalk::HalfBlocks => fits_half_blocks(spec),
            BwdWalk::SplitDims | BwdWalk::InClusters => dim == 256,
            BwdWalk::GradientEach => dim == 192,
        };
        if !takes_dims {
            return Err(format!("walk {set}: not for a padded head dimension of {dim} with a V of {v}"));
        }
        let keys = if walk.splits_dims() { 64 } else { 128 };
        if block_n != keys {
            return Err(format!("block_n {block_n} is not {keys}: walk {set}"));
        }
        Ok(())
    }

    /// Checks how dQ is added to its sums, and which launch converts these sums to dQ.
    fn check_way_of_dq(&self, spec: &BwdSpec) -> Result<(), String> {
        // Without a mask the ordered key blocks of a group wait for each other: if a CTA took its next tile index
        // ahead, it could wait for its own present tile.
        if spec.deterministic && !self.keeps_dq_apart() && self.persistent && spec.fwd.mask == MaskKind::Full
        {
            return Err(
                "persistent true: without a mask, ordered sums of dQ want all key blocks of a group at work"
                    .to_owned(),
            );
        }
        if self.dq_path == DqPath::FirstStores && spec.deterministic {
            return Err(
                "dq_path first_stores: not with deterministic, whose additions have an order".to_owned()
            );
        }
        if self.keeps_dq_apart() && !spec.deterministic {
            return Err("dq_path apart: it is for deterministic, whose additions have an order".to_owned());
        }
        if self.finishes_dq() && !self.may_finish_dq(spec) {
            return Err(format!(
                "dq_finish {}: not with dq_path registers, walk half_blocks, deterministic, nor without persistent",
                self.dq_finish.name()
            ));
        }
        if self.makes_delta() && !self.may_make_delta(spec) {
            return Err(
                "dq_finish beside_with_delta: it is for dq_path first_stores, vector_load, whole 32 of block_m and scores \
                 without bias or softcap"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// Checks the roles of the loop over query blocks, and a block's queries.
    fn check_roles(&self) -> Result<(), String> {
        let walk = self.walk;
        let set = walk.name();
        // The registers that the load role leaves are divided between two consumers, and half of them must be a
        // multiple of eight.
        if !matches!(self.load_registers, 24 | 40) {
            return Err(format!("load_registers {} is not 24 or 40", self.load_registers));
        }
        let in_parts = walk.score_parts() > 1;
        if in_parts && self.adds_from_registers() {
            return Err("dq_path registers: walk half_blocks hands dQ to the store warp".to_owned());
        }
        if (in_parts || walk == BwdWalk::GradientEach) && self.edges_apart {
            return Err(format!("edges_apart true: walk {set} has one loop"));
        }
        if walk.splits_dims() && self.block_m != 2 * SPLIT_QUERIES {
            return Err(format!("block_m {} is not {}: walk {set}", self.block_m, 2 * SPLIT_QUERIES));
        }
        Ok(())
    }

    /// Checks the number of blocks that are in shared memory at a time.
    fn check_stages(&self, spec: &BwdSpec) -> Result<(), String> {
        let walk = self.walk;
        let set = walk.name();
        for (field, stages) in [
            ("stages_q", self.stages_q),
            ("stages_dout", self.stages_dout),
            ("stages_ds", self.stages_ds),
            ("stages_dbias", self.stages_dbias),
        ] {
            if !(1..=4).contains(&stages) {
                return Err(format!("{field} {stages} is not from 1 to 4"));
            }
        }
        let may_store = walk == BwdWalk::GradientEach && self.dq_path == DqPath::StoreWarp;
        if walk.cluster() > 1 && !self.adds_from_registers() && !may_store {
            return Err(format!("dq_path {}: walk {set} adds dQ from registers", self.dq_path.name()));
        }
        if walk == BwdWalk::GradientEach && self.stages_dout < 2 {
            return Err(format!(
                "stages_dout {}: walk {set} holds two blocks of dO at a time",
                self.stages_dout
            ));
        }
        // P and dS of the next block are stored while this block's are read. P has only one slot if dQ is stored;
        // the slot of dS then tells whether it is free.
        if walk == BwdWalk::GradientEach && self.stages_ds != 2 {
            return Err(format!("stages_ds {}: walk {set} holds two blocks of dS at a time", self.stages_ds));
        }
        if walk.has_next_scores() && self.stages_q < 2 {
            return Err(format!("stages_q {}: walk {set} holds two blocks of Q at a time", self.stages_q));
        }
        // A warp stages 16 rows of 64 columns at a time in shared memory.
        let staged = 4 * self.num_consumers() * 16 * 64 * 2;
        if self.vector_store && spec.dtype_grad != DType::F32 && staged > self.ds_bytes() {
            return Err(format!(
                "stages_ds {}: dK and dV leave through the {} bytes of dS, and want {staged}",
                self.stages_ds,
                self.ds_bytes()
            ));
        }
        Ok(())
    }

    /// Checks the columns of dQ, dropout's decisions and the registers that a consumer has.
    fn check_shares(&self, spec: &BwdSpec) -> Result<(), String> {
        let (dim, walk, block_m) = (padded_dim(spec), self.walk, self.block_m);
        let (what, shared_out) =
            if transposes_dq(dim) { ("the padded head dimension", dim) } else { ("block_m", block_m) };
        let rows_of_all = walk.splits_dims() || walk.score_parts() > 1;
        let wanted = if rows_of_all { 64 } else { 64 * self.num_consumers() };
        if shared_out != wanted {
            return Err(format!(
                "{what} {shared_out} is not 64 for each of {} consumers",
                self.num_consumers()
            ));
        }
        let (queries, of_dk, of_dv) = self.consumer_columns(spec);
        // One step of the generator decides for four calls of eight queries each, or half of that where the next scores
        // are started early.
        let decided = if walk == BwdWalk::EarlyScores { 64 } else { 32 };
        if spec.fwd.dropout && queries % decided != 0 {
            return Err(format!(
                "block_m {block_m}: of a consumer's {queries} queries dropout decides {decided} at a time"
            ));
        }
        let accumulators = queries.max(self.dq_columns(spec) / 2) + (of_dk + of_dv) / 2;
        if accumulators > MAX_ACCUMULATORS {
            return Err(format!(
                "block_m {block_m}: {accumulators} accumulators a thread are more than {MAX_ACCUMULATORS}"
            ));
        }
        Ok(())
    }
}

/// Whether [`BwdWalk::HalfBlocks`] has registers for dK and dV of 64 keys, and three chunks of dQ to share out.
pub(super) const fn fits_half_blocks(spec: &BwdSpec) -> bool {
    let (qk, v) = (spec.fwd.head_dim_qk, spec.fwd.head_dim_v);
    qk > 128 && padded_dim(spec) == 192 && own_width(qk) + own_width(v) <= 320
}
