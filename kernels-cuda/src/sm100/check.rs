//! Fields of the tile by name (`block_m=128 stages=3`), as in the command, the benches and plan options, and checks
//! of their combinations.

use fmha_core::fields::{FieldValue as _, Fields as _};
use fmha_core::spec::{FwdSpec, KvKind};

use super::{MAX_SMEM_BYTES, Sm100Tile, TMEM_COLUMNS, halves_v};
use crate::schedule::TileOrder;
use crate::split;

impl Sm100Tile {
    /// Sets one field from its name and value.
    ///
    /// # Errors
    /// A text with the field, the value and the allowed values.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        self.set_field(name, value).map_err(|text| format!("tile {text}"))?;
        if self.split_keys == 0 && name == "split_keys" {
            (self.shares, self.fixed_parts) = (0, false);
        }
        Ok(())
    }

    /// Whether the kernel can be compiled so for a spec, and launched where a kv head has `gqa_ratio`
    /// query heads.
    ///
    /// # Errors
    /// A text that names the fields and numbers that do not go together.
    pub fn check(&self, spec: &FwdSpec, gqa_ratio: u32) -> Result<(), String> {
        let refuse = |words: String| Err(format!("tile {words}"));
        if self.pack_gqa && gqa_ratio > 128 {
            return refuse(format!("pack_gqa=1: {gqa_ratio} heads are more than a query tile's 128 rows"));
        }
        let divides = 128_u32.is_multiple_of(gqa_ratio.max(1));
        if self.pack_gqa && !divides && self.block_m > 128 {
            return refuse(format!(
                "pack_gqa=1 with block_m={}: {gqa_ratio} heads do not divide a query tile's 128 rows",
                self.block_m
            ));
        }
        if self.pack_gqa && divides == self.whole_groups {
            return refuse(format!(
                "whole_groups={}: a query tile has 128 rows of {gqa_ratio} heads",
                i32::from(self.whole_groups)
            ));
        }
        split::check_shares(self.shares, self.split_keys, self.fixed_parts)?;
        if self.fixed_parts && (self.split_keys == 0 || self.order == TileOrder::Dynamic) {
            return refuse(format!(
                "fixed_parts=1 with split_keys={} and order={}: parts of a launch for some rows, whose tiles no counter deals",
                self.split_keys,
                self.order.name()
            ));
        }
        if self.num_q_tiles() == 2 && self.stages < 2 {
            return refuse(format!(
                "stages={} with block_m={}: a block of V and one of K are read in turn",
                self.stages, self.block_m
            ));
        }
        if self.lazy_rescale_log2 > 0 && spec.dtype_v.is_fp8() {
            return refuse(format!(
                "lazy_rescale_log2={} with dtype_v {}: P would pass its largest number",
                self.lazy_rescale_log2, spec.dtype_v
            ));
        }
        if self.cluster > 1 && (self.copy_bytes > 0 || self.split_keys > 0) {
            return refuse(format!(
                "cluster={} with copy_bytes={} and split_keys={}: a pair of CTAs loads by TMA, and sees all keys",
                self.cluster, self.copy_bytes, self.split_keys
            ));
        }
        if self.cluster > 1 && spec.kv_layout == KvKind::Paged {
            return refuse(format!(
                "cluster={} with pages: a pair of CTAs loads blocks by halves",
                self.cluster
            ));
        }
        if self.cluster > 1 && !halves_v(spec) {
            return refuse(format!(
                "cluster={} with head_dim_v {} of dtype_v {}: half of a row is not whole swizzle spans",
                self.cluster, spec.head_dim_v, spec.dtype_v
            ));
        }
        if self.scale_block > 0 && (self.cluster > 1 || self.split_keys > 0 || self.shares > 0) {
            return refuse(format!(
                "cluster={} split_keys={} shares={} beside scales by blocks: a CTA by itself sees all keys",
                self.cluster, self.split_keys, self.shares
            ));
        }
        if self.has_pairs() && self.block_n % 64 != 0 {
            return refuse(format!("block_n={} beside pairs of elements: a step has 64 keys", self.block_n));
        }
        self.check_transposition(spec).or_else(&refuse)?;
        if self.split_keys % self.block_n != 0 {
            return refuse(format!(
                "split_keys={} is not a multiple of block_n={}",
                self.split_keys, self.block_n
            ));
        }
        let columns = self.tmem_columns(spec);
        if columns > TMEM_COLUMNS {
            return refuse(format!(
                "block_m={} block_n={} with head_dim_v {} takes {columns} columns of tensor memory of {TMEM_COLUMNS}",
                self.block_m, self.block_n, spec.head_dim_v
            ));
        }
        let bytes = self.smem_bytes(spec);
        if bytes > MAX_SMEM_BYTES {
            return refuse(format!(
                "block_m={} block_n={} stages={} takes {bytes} bytes of shared memory of {MAX_SMEM_BYTES}",
                self.block_m, self.block_n, self.stages
            ));
        }
        Ok(())
    }

    /// Checks that the tile can use lists of tiles under masks.
    ///
    /// # Errors
    /// A text with the field that gives tiles of several heads or of only a part of the keys.
    pub fn check_lists(&self) -> Result<(), String> {
        for (field, value, is_set) in [
            ("cluster", self.cluster, self.cluster > 1),
            ("pack_gqa", i32::from(self.pack_gqa), self.pack_gqa),
            ("split_keys", self.split_keys, self.split_keys > 0),
        ] {
            if is_set {
                return Err(format!(
                    "tile {field}={value} beside masks, whose lists are of one head's tiles"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use fmha_core::{DType, MaskKind};

    use super::*;
    use crate::sm100::default_tile;

    fn refusal(head_dim: i32, words: &[(&str, &str)]) -> String {
        let spec = FwdSpec::plain(DType::Bf16, head_dim, MaskKind::Upper);
        let mut tile = default_tile(&spec);
        let set = words.iter().try_for_each(|(key, value)| tile.set(key, value));
        set.and_then(|()| tile.check(&spec, 3)).unwrap_err()
    }

    #[test]
    fn wrong_fields_are_refused_with_their_name_and_number() {
        for (head_dim, words, names) in [
            (128, &[("block_m", "96")][..], &["block_m", "96"][..]),
            (128, &[("block_n", "80")], &["block_n", "80"]),
            (128, &[("stages", "0")], &["stages", "0"]),
            (128, &[("stages", "8")], &["stages", "8", "bytes"]),
            (128, &[("stages", "1")], &["stages", "1", "block_m", "256"]),
            (128, &[("order", "random")], &["order", "random"]),
            (128, &[("pack_gqa", "1")], &["pack_gqa", "3", "128"]),
            (128, &[("shares", "8")], &["shares=8", "split_keys=0"]),
            (128, &[("fixed_parts", "1")], &["fixed_parts=1", "split_keys=0"]),
            (128, &[("fixed_parts", "1"), ("split_keys", "256")], &["fixed_parts=1", "order=dynamic"]),
            (128, &[("split_keys", "192")], &["split_keys", "192", "block_n", "128"]),
            (128, &[("cluster", "3")], &["cluster", "3"]),
            (128, &[("cluster", "2"), ("copy_bytes", "8")], &["cluster=2", "copy_bytes=8"]),
            (128, &[("cluster", "2"), ("split_keys", "256")], &["cluster=2", "split_keys=256"]),
            (256, &[("block_m", "256")], &["block_m", "256", "768 columns"]),
            (128, &[("blok_n", "1")], &["blok_n", "block_n"]),
        ] {
            let text = refusal(head_dim, words);
            assert!(names.iter().all(|name| text.contains(name)), "{words:?}: {text}");
        }
    }

    #[test]
    fn the_table_s_tiles_fit_tensor_and_shared_memory() {
        for head_dim in [8, 64, 72, 96, 128, 136, 160, 192, 224, 256] {
            for head_dim_v in [8, 64, 96, 128, 160, 192, 256] {
                let spec = FwdSpec { head_dim_v, ..FwdSpec::plain(DType::F16, head_dim, MaskKind::Full) };
                let tile = default_tile(&spec);
                tile.check(&spec, 1).unwrap();
                assert!(tile.stages >= 2, "{head_dim}/{head_dim_v}: {tile:?}");
            }
        }
    }
}
