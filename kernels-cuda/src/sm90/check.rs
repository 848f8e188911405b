//! Sets the tile's fields by name, `block_m=128 stages=3`, as the command, the benches and plan options write them, and
//! checks that the fields go together.

use fmha_core::fields::{FieldValue as _, Fields as _};
use fmha_core::spec::{FwdSpec, KvKind};
use fmha_core::{DType, MaskKind, VLayout};

use super::{MAX_SMEM_BYTES, PrepareV, Sm90Tile, TileOrder, ValueProduct};
use crate::round_up;
use crate::split;

impl Sm90Tile {
    /// Sets one field from its name and value. Fields that are incompatible with the new value are reset: clusters,
    /// packed heads and copies reset the bias by TMA; `cluster=1` resets `cluster_heads`; parts of the keys reset
    /// clusters, `skip_row_max` and `prepare_v`, and these reset parts; a `pv` other than `f16` resets lazy
    /// rescaling; one without flushing resets `output_columns`; `lazy_rescale_log2=0` resets `skip_row_max`.
    /// [`Sm90Tile::check`] refuses the tile if a later field sets one of them again.
    ///
    /// # Errors
    /// A text with the field, the value and the allowed values.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let was = *self;
        self.set_field(name, value).map_err(|text| format!("tile {text}"))?;
        if was.pv == ValueProduct::F16 && self.pv != ValueProduct::F16 {
            (self.lazy_rescale_log2, self.skip_row_max) = (0, false);
        }
        if was.flushes_output() && !self.flushes_output() {
            self.output_columns = 0;
        }
        if was.cluster > 1 && self.cluster == 1 {
            self.cluster_heads = false;
        }
        let loads_own_rows = self.cluster == 1 && !self.pack_gqa && self.copy_bytes == 0;
        if was.split_keys == 0 && self.split_keys > 0 {
            (self.skip_row_max, self.cluster, self.cluster_heads) = (false, 1, false);
            self.prepare_v = PrepareV::InTile;
        } else if was.split_keys == self.split_keys && !self.takes_parts() {
            self.split_keys = 0;
        } else if was.block_n != self.block_n {
            self.split_keys = round_up(self.split_keys, self.block_n);
        }
        if self.split_keys == 0 || self.fixed_parts {
            self.shares = 0;
        }
        let cuts_for_all = |tile: &Self| tile.split_keys > 0 && tile.fixed_parts;
        if !cuts_for_all(&was) && cuts_for_all(self) && self.order == TileOrder::Dynamic {
            self.order = TileOrder::Static;
        }
        if was.fold_keys == 0 && self.fold_keys > 0 {
            (self.split_keys, self.fixed_parts, self.shares, self.skip_row_max) = (0, false, 0, false);
        } else if self.split_keys > 0 || self.skip_row_max {
            self.fold_keys = 0;
        } else if was.block_n != self.block_n {
            self.fold_keys = round_up(self.fold_keys, self.block_n);
        }
        if self.fold_keys == 0 {
            self.fold_in_shared = false;
        }
        if was.bias_stages == self.bias_stages && !loads_own_rows {
            self.bias_stages = 0;
        }
        if was.lazy_rescale_log2 > 0 && self.lazy_rescale_log2 == 0 {
            self.skip_row_max = false;
        }
        Ok(())
    }

    /// Whether a tile may process only a part of its sequence's keys.
    pub(super) fn takes_parts(&self) -> bool {
        self.cluster == 1 && !self.skip_row_max && self.prepare_v == PrepareV::InTile
    }

    /// Whether the kernel can be compiled so for a spec, and launched where a kv head has `gqa_ratio`
    /// query heads.
    ///
    /// # Errors
    /// A text that names the fields and numbers that do not go together.
    pub fn check(&self, spec: &FwdSpec, gqa_ratio: u32) -> Result<(), String> {
        let refuse = |words: String| Err(format!("tile {words}"));
        if self.wait_anchor > self.block_n / 2 {
            return refuse(format!(
                "wait_anchor={} is more than the block_n / 2 = {} exponentials of a thread",
                self.wait_anchor,
                self.block_n / 2
            ));
        }
        let divides = self.block_m.unsigned_abs().is_multiple_of(gqa_ratio.max(1));
        if self.pack_gqa && gqa_ratio > self.block_m.unsigned_abs() {
            return refuse(format!(
                "pack_gqa=1: {gqa_ratio} heads are more than block_m={} rows",
                self.block_m
            ));
        }
        if self.pack_gqa && divides == self.whole_groups {
            return refuse(format!(
                "whole_groups={}: block_m={} rows of {gqa_ratio} heads",
                i32::from(self.whole_groups),
                self.block_m
            ));
        }
        if self.pack_gqa && !divides && self.cluster > 1 {
            return refuse(format!("cluster=2: {gqa_ratio} heads do not divide block_m={}", self.block_m));
        }
        split::check_shares(self.shares, self.split_keys, self.fixed_parts)?;
        if self.splits_q() && self.pack_gqa && !64_u32.is_multiple_of(gqa_ratio.max(1)) {
            return refuse(format!(
                "pack_gqa=1 with lookahead=spare_piece: {gqa_ratio} heads do not divide a piece's 64 rows"
            ));
        }
        if self.cluster > 1 && self.copy_bytes > 0 {
            return refuse(format!(
                "copy_bytes={} with cluster=2: only TMA writes to two CTAs",
                self.copy_bytes
            ));
        }
        if spec.kv_layout == KvKind::Paged {
            for (field, on) in [
                ("cluster=2: its CTAs load halves of blocks", self.cluster > 1),
                (
                    "prepare_v: a block of the workspace would have keys of several pages",
                    self.prepare_v != PrepareV::InTile,
                ),
                (
                    "block_m=192: the warp that looks up pages would have too few registers",
                    self.num_consumers() > 2,
                ),
            ] {
                if on {
                    return refuse(format!("keys in pages with {field}"));
                }
            }
        }
        if self.raw_stages > 0 {
            for (field, on) in [
                ("copy_bytes", self.copy_bytes > 0),
                ("cluster=2", self.cluster > 1),
                ("bias_stages", self.bias_stages > 0),
                ("block_m=192", self.num_consumers() > 2),
            ] {
                if on {
                    return refuse(format!(
                        "{field} with a cache of {}: its CTA brings it by TMA, and two spare warps widen it",
                        self.stored
                    ));
                }
            }
        }
        if self.cluster_heads {
            if self.cluster == 1 {
                return refuse("cluster_heads=1 with cluster=1: there is one head".to_owned());
            }
            if self.pack_gqa {
                return refuse(
                    "cluster_heads=1 with pack_gqa=1: a group's heads are rows of one CTA".to_owned(),
                );
            }
            if !gqa_ratio.is_multiple_of(2) {
                return refuse(format!(
                    "cluster_heads=1: a kv head has {gqa_ratio} query heads, no even number"
                ));
            }
        }
        if self.copy_bytes > 0 && self.num_consumers() > 2 {
            return refuse(format!(
                "copy_bytes={} with block_m={}: the threads that copy would have too few registers",
                self.copy_bytes, self.block_m
            ));
        }
        if self.copy_bytes > 0 && spec.v_layout == VLayout::ColMajor {
            return refuse(format!("copy_bytes={}: v_layout is column-major", self.copy_bytes));
        }
        if self.skip_row_max && self.lazy_rescale_log2 == 0 {
            return refuse(
                "skip_row_max=1 with lazy_rescale_log2=0: without maxima, they cannot be exact".to_owned(),
            );
        }
        if self.skip_row_max && spec.mask == MaskKind::Band {
            return refuse("skip_row_max=1: the mask has a lower bound".to_owned());
        }
        if self.fold_in_shared && self.fold_keys == 0 {
            return refuse("fold_in_shared=1 with fold_keys=0: no parts are folded".to_owned());
        }
        if self.fold_keys > 0 {
            let keys = self.fold_keys;
            if keys % self.block_n != 0 {
                return refuse(format!("fold_keys={keys} is not a multiple of block_n={}", self.block_n));
            }
            for (field, on) in [
                ("split_keys", self.split_keys > 0),
                ("skip_row_max=1", self.skip_row_max),
                ("order=single", self.order == TileOrder::Single),
                ("a learnable sink", spec.sink),
                ("sink columns", spec.sink_columns),
                ("an O of 8 bits", spec.dtype_o.is_fp8()),
                ("Q of 8 bits", spec.dtype_qk.is_fp8()),
            ] {
                if on {
                    return refuse(format!(
                        "fold_keys={keys} with {field}: a CTA folds parts of the band's keys"
                    ));
                }
            }
        }
        if self.split_keys > 0 && self.fixed_parts && self.order == TileOrder::Dynamic {
            return refuse(format!(
                "fixed_parts=1 with split_keys={} and order=dynamic: parts of a launch for some rows, whose tiles no counter deals",
                self.split_keys
            ));
        }
        if self.split_keys > 0 {
            let keys = self.split_keys;
            if keys % self.block_n != 0 {
                return refuse(format!("split_keys={keys} is not a multiple of block_n={}", self.block_n));
            }
            for (field, on) in [
                ("cluster=2", self.cluster > 1),
                ("skip_row_max=1", self.skip_row_max),
                ("prepare_v", self.prepare_v != PrepareV::InTile),
            ] {
                if on {
                    return refuse(format!("split_keys={keys} with {field}: a tile has a part of the keys"));
                }
            }
        }
        if self.bias_stages > 0 {
            let stages = self.bias_stages;
            if !super::adds_wide_elements(spec) {
                return refuse(format!(
                    "bias_stages={stages}: there is no elementwise bias of 16 bits, or a soft-cap beside it"
                ));
            }
            for (field, on) in [
                ("pack_gqa=1", self.pack_gqa),
                ("cluster=2", self.cluster > 1),
                ("copy_bytes", self.copy_bytes > 0),
            ] {
                if on {
                    return refuse(format!(
                        "bias_stages={stages} with {field}: a spare warp of the load role brings one head's rows by TMA"
                    ));
                }
            }
        }
        self.check_fp8(spec)?;
        let bytes = self.smem_bytes(spec);
        if bytes > MAX_SMEM_BYTES {
            return refuse(format!(
                "block_m={} block_n={} stages={} takes {bytes} bytes of shared memory of {MAX_SMEM_BYTES}",
                self.block_m, self.block_n, self.stages
            ));
        }
        Ok(())
    }

    /// Checks fields with FP8, and fields that need FP8.
    fn check_fp8(&self, spec: &FwdSpec) -> Result<(), String> {
        let refuse = |words: String| Err(format!("tile {words}"));
        let (qk, v) = (spec.dtype_qk, spec.dtype_v);
        if qk.is_fp8() && self.copy_bytes > 0 {
            return refuse(format!("copy_bytes={}: dtype_qk {qk} is loaded by TMA alone", self.copy_bytes));
        }
        if self.pv != ValueProduct::Direct && !v.is_fp8() {
            return refuse(format!("pv={}: dtype_v is {v}, not FP8", self.pv.name()));
        }
        if self.prepare_v != PrepareV::InTile {
            let set = format!("prepare_v={}", self.prepare_v.name());
            if !v.is_fp8() {
                return refuse(format!("{set}: dtype_v is {v}, not FP8"));
            }
            if spec.v_layout == VLayout::ColMajor {
                return refuse(format!("{set}: v_layout is column-major"));
            }
        }
        if self.prepares_v(spec) && self.cluster > 1 {
            return refuse(format!(
                "cluster=2: a V of dtype_v {v} is prepared by the load role's warpgroup, for its own CTA"
            ));
        }
        if self.pv == ValueProduct::F16 && spec.v_layout == VLayout::ColMajor && self.block_n % 32 != 0 {
            return refuse(format!(
                "block_n={}: a column-major V of dtype_v {v} comes in whole 32 bytes",
                self.block_n
            ));
        }
        if !self.operand_v(spec).is_fp8() {
            if self.output_columns > 0 {
                return refuse(format!(
                    "output_columns={}: P V is a product of 16 bits, summed in f32",
                    self.output_columns
                ));
            }
            return Ok(());
        }
        if self.skip_row_max {
            return refuse(format!("skip_row_max=1: a P of dtype_v {v} has no room above a row's maximum"));
        }
        if self.block_n % 32 != 0 {
            return refuse(format!(
                "block_n={}: a product of dtype_v {v} contracts 32 keys at a time",
                self.block_n
            ));
        }
        // P's offset plus the threshold must stay below log2 of the largest number: 448 (E4M3) and 57344 (E5M2).
        let range = if v == DType::E4m3Fn { 8 } else { 15 };
        if self.lazy_rescale_log2 > range {
            return refuse(format!(
                "lazy_rescale_log2={}: a P of dtype_v {v} reaches 2^{range}",
                self.lazy_rescale_log2
            ));
        }
        if self.output_columns > 0 {
            let dim = super::padded_dim(spec.head_dim_v);
            if !self.flushes_output() {
                return refuse(format!(
                    "output_columns={} with pv=direct: parts of O are flushed with every block",
                    self.output_columns
                ));
            }
            if dim % self.output_columns != 0 {
                return refuse(format!(
                    "output_columns={} does not divide the {dim} columns of O",
                    self.output_columns
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sm90::default_tile;

    fn refusal(words: &[(&str, &str)]) -> String {
        let spec = FwdSpec::plain(DType::Bf16, 128, MaskKind::Upper);
        let mut tile = default_tile(&spec);
        let set = words.iter().try_for_each(|(key, value)| tile.set(key, value));
        set.and_then(|()| tile.check(&spec, 3)).unwrap_err()
    }

    #[test]
    fn wrong_fields_are_refused_with_their_name_and_number() {
        for (words, names) in [
            (&[("block_m", "96")][..], &["block_m", "96"][..]),
            (&[("block_n", "40")], &["block_n", "40"]),
            (&[("block_n", "272")], &["block_n", "272"]),
            (&[("stages", "0")], &["stages", "0"]),
            (&[("stages", "8")], &["stages", "8", "bytes"]),
            (&[("order", "random")], &["order", "random"]),
            (&[("cluster", "4")], &["cluster", "4"]),
            (&[("copy_bytes", "3")], &["copy_bytes", "3"]),
            (&[("pv", "flushed")], &["pv=flushed", "bf16"]),
            (&[("lookahead", "1")], &["lookahead=1", "spare_piece"]),
            (&[("pack_gqa", "1")], &["whole_groups=0", "3", "128"]),
            (&[("wait_anchor", "100")], &["wait_anchor", "100", "64"]),
            (&[("cluster_heads", "1")], &["cluster_heads", "cluster=1"]),
            (&[("cluster", "2"), ("cluster_heads", "1")], &["cluster_heads", "3"]),
            (&[("block_m", "192"), ("copy_bytes", "4")], &["copy_bytes", "4", "block_m", "192"]),
            (&[("lazy_rescale_log2", "0"), ("skip_row_max", "1")], &["skip_row_max", "lazy_rescale_log2"]),
            (&[("bias_stages", "1")], &["bias_stages=1", "16 bits"]),
            (&[("split_keys", "160")], &["split_keys=160", "block_n=128"]),
            (&[("fold_keys", "160")], &["fold_keys=160", "block_n=128"]),
            (
                &[("split_keys", "256"), ("fixed_parts", "1"), ("order", "dynamic")],
                &["fixed_parts=1", "split_keys=256", "order=dynamic"],
            ),
            (&[("fold_keys", "256"), ("order", "single")], &["fold_keys=256", "order=single"]),
            (&[("blok_n", "1")], &["blok_n", "block_n"]),
        ] {
            let text = refusal(words);
            assert!(names.iter().all(|name| text.contains(name)), "{words:?}: {text}");
        }
    }

    #[test]
    fn every_field_can_be_set_to_what_it_has_and_to_all_that_tuning_tries() {
        let tile = default_tile(&FwdSpec::plain(DType::F16, 128, MaskKind::Full));
        // Fields for groups, pages and the cache's type follow from the problem.
        let is_set = |name: &str| !["whole_groups", "page_keys", "stored", "raw_stages"].contains(&name);
        let values = tile.named_values().into_iter().filter(|(name, _)| is_set(name));
        let fields = Sm90Tile::fields().iter().filter(|field| is_set(field.name));
        for (field, (name, value)) in fields.zip(values) {
            let mut same = tile;
            same.set(name, &value).unwrap();
            assert_eq!(same, tile, "{name}={value}");
            for value in field.tried() {
                let mut changed = tile;
                changed.set(name, &value).unwrap();
                assert!(changed.named_values().contains(&(field.name, value)), "{name}");
            }
        }
    }

    #[test]
    fn parts_of_the_keys_are_whole_blocks_and_yield_to_what_they_cannot_go_with() {
        let start = default_tile(&FwdSpec::plain(DType::F16, 128, MaskKind::Full));
        let split = Sm90Tile { skip_row_max: false, block_n: 128, split_keys: 256, ..start };
        for (name, value, keys) in [
            ("cluster", "2", 0),
            ("skip_row_max", "1", 0),
            ("prepare_v", "before", 0),
            ("block_n", "96", 288),
        ] {
            let mut tile = split;
            tile.set(name, value).unwrap();
            assert_eq!(tile.split_keys, keys, "{name}={value}");
        }
        let spec = FwdSpec::plain(DType::F16, 128, MaskKind::Full);
        for tile in [Sm90Tile { cluster: 2, ..split }, Sm90Tile { skip_row_max: true, ..split }] {
            assert!(tile.check(&spec, 1).unwrap_err().contains("split_keys=256"));
        }
    }

    #[test]
    fn what_a_field_cannot_go_with_is_given_up() {
        let start = default_tile(&FwdSpec::plain(DType::F16, 128, MaskKind::Full));
        let start =
            Sm90Tile { skip_row_max: true, cluster: 2, cluster_heads: true, pv: ValueProduct::F16, ..start };
        for (name, value, yields) in [
            ("cluster", "1", &["cluster_heads"][..]),
            ("lazy_rescale_log2", "0", &["skip_row_max"]),
            ("pv", "direct", &["lazy_rescale_log2", "skip_row_max"]),
            ("split_keys", "256", &["skip_row_max", "cluster", "cluster_heads"]),
        ] {
            let mut tile = start;
            tile.set(name, value).unwrap();
            let (before, after) = (start.named_values(), tile.named_values());
            let changed = before.iter().zip(&after).filter(|(before, after)| before != after);
            let changed: Vec<_> =
                changed.map(|(_, (field, _))| *field).filter(|field| *field != name).collect();
            let mut expected = yields.to_vec();
            expected.sort_by_key(|field| before.iter().position(|(name, _)| name == field));
            assert_eq!(changed, expected, "{name}={value}");
        }
    }
}
