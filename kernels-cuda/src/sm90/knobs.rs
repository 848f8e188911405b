//! The tile by name: `block_m=128 stages=3`, as the command, the benches and plan options say it.

use fmha_core::DType;
use fmha_core::VLayout;
use fmha_core::spec::FwdSpec;

use super::{MAX_SMEM_BYTES, Sm90Tile, TileOrder};

/// The fields that [`Sm90Tile::set`] knows.
pub const FIELDS: &str = "block_m, block_n, stages, order, ping_pong, lookahead, split_q, lazy_rescale_log2, wait_anchor, \
                          exp2_polynomial_every, skip_row_max, pack_gqa, vector_store, copy_bytes, warp_specialised, \
                          cluster, cluster_heads, q_in_registers, f16_scores, f16_output, dependent_launch";

impl Sm90Tile {
    /// Sets one field from its name and value. What a field cannot go with is set along:
    /// `warp_specialised=0` ends ping-pong, lookahead and `skip_row_max`, `cluster=1` its heads, `f16_output=1` lazy
    /// rescaling, which lets sums grow beyond f16; `lazy_rescale_log2=0` and a polynomial, which has no overflow
    /// to see, end `skip_row_max`. [`Sm90Tile::check`] refuses it if a later word brings it back.
    ///
    /// # Errors
    /// A text that names the field, the value and what the field takes.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let wrong = |takes: &str| Err(format!("tile {key}={value} is not {takes}"));
        let number = || value.parse::<i32>().map_err(|_| format!("tile {key}={value} is no whole number"));
        let within = |least: i32, most: i32| match number()? {
            n if (least..=most).contains(&n) => Ok(n),
            _ => Err(format!("tile {key}={value} is not in {least}..={most}")),
        };
        let flag = || match value {
            "1" | "true" => Ok(true),
            "0" | "false" => Ok(false),
            _ => Err(format!("tile {key}={value} is neither 0 nor 1")),
        };
        match key {
            "block_m" => match number()? {
                n @ (64 | 128 | 192) => self.block_m = n,
                _ => return wrong("64, 128 or 192"),
            },
            "block_n" => match within(16, 256)? {
                n if n % 16 == 0 => self.block_n = n,
                _ => return wrong("a multiple of 16"),
            },
            "stages" => self.stages = within(1, 8)?,
            "order" => {
                self.order = match value {
                    "single" => TileOrder::Single,
                    "static" => TileOrder::Static,
                    "dynamic" => TileOrder::Dynamic,
                    _ => return wrong("single, static or dynamic"),
                }
            }
            "ping_pong" => self.ping_pong = flag()?,
            "lookahead" => {
                self.lookahead = flag()?;
                self.split_q &= self.lookahead;
            }
            "split_q" => {
                self.split_q = flag()?;
                self.lookahead |= self.split_q;
            }
            "lazy_rescale_log2" => {
                self.lazy_rescale_log2 = within(0, 11)?;
                self.skip_row_max &= self.lazy_rescale_log2 > 0;
            }
            "wait_anchor" => self.wait_anchor = within(0, 128)?,
            "exp2_polynomial_every" => {
                self.exp2_polynomial_every = within(0, 128)?;
                self.skip_row_max &= self.exp2_polynomial_every == 0;
            }
            "skip_row_max" => self.skip_row_max = flag()?,
            "pack_gqa" => self.pack_gqa = flag()?,
            "vector_store" => self.vector_store = flag()?,
            "copy_bytes" => match number()? {
                n @ (0 | 2 | 4 | 8 | 16) => self.copy_bytes = n,
                _ => return wrong("0 (TMA), 2, 4, 8 or 16"),
            },
            "warp_specialised" => {
                self.warp_specialised = flag()?;
                self.ping_pong &= self.warp_specialised;
                self.lookahead &= self.warp_specialised;
                self.split_q &= self.warp_specialised;
                self.skip_row_max &= self.warp_specialised;
            }
            "cluster" => {
                self.cluster = within(1, 2)?;
                self.cluster_heads &= self.cluster > 1;
            }
            "cluster_heads" => self.cluster_heads = flag()?,
            "q_in_registers" => self.q_in_registers = flag()?,
            "f16_scores" => self.f16_scores = flag()?,
            "f16_output" => {
                self.f16_output = flag()?;
                if self.f16_output {
                    self.lazy_rescale_log2 = 0;
                    self.skip_row_max = false;
                }
            }
            "dependent_launch" => self.dependent_launch = flag()?,
            _ => return Err(format!("tile {key}={value}: there is no such field (known: {FIELDS})")),
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
        if self.wait_anchor > self.block_n / 2 {
            return refuse(format!(
                "wait_anchor={} is more than the block_n / 2 = {} exponentials of a thread",
                self.wait_anchor,
                self.block_n / 2
            ));
        }
        if self.pack_gqa && !self.block_m.unsigned_abs().is_multiple_of(gqa_ratio.max(1)) {
            return refuse(format!("pack_gqa=1: {gqa_ratio} heads do not divide block_m={}", self.block_m));
        }
        if self.split_q && !self.lookahead {
            return refuse("split_q=1 with lookahead=0: a spare piece of Q is for lookahead".to_owned());
        }
        if self.split_q && self.pack_gqa && !64_u32.is_multiple_of(gqa_ratio.max(1)) {
            return refuse(format!(
                "pack_gqa=1 with split_q=1: {gqa_ratio} heads do not divide a piece's 64 rows"
            ));
        }
        if !self.warp_specialised {
            for (field, on) in [
                ("ping_pong=1", self.ping_pong),
                ("lookahead=1", self.lookahead),
                ("skip_row_max=1", self.skip_row_max),
                ("copy_bytes", self.copy_bytes > 0),
                ("cluster=2", self.cluster > 1),
            ] {
                if on {
                    return refuse(format!("{field} needs a load role, but warp_specialised=0"));
                }
            }
        }
        if self.cluster > 1 && self.copy_bytes > 0 {
            return refuse(format!(
                "copy_bytes={} with cluster=2: only TMA writes to two CTAs",
                self.copy_bytes
            ));
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
        for (field, on) in [("f16_scores", self.f16_scores), ("f16_output", self.f16_output)] {
            if on && spec.dtype_qk != DType::F16 {
                return refuse(format!("{field}=1: dtype_qk is {}, not f16", spec.dtype_qk));
            }
        }
        if self.f16_output && self.lazy_rescale_log2 > 0 {
            return refuse(format!(
                "lazy_rescale_log2={} with f16_output=1: sums could pass 65504",
                self.lazy_rescale_log2
            ));
        }
        if self.skip_row_max && self.lazy_rescale_log2 == 0 {
            return refuse(
                "skip_row_max=1 with lazy_rescale_log2=0: without maxima, they cannot be exact".to_owned(),
            );
        }
        if self.skip_row_max && self.exp2_polynomial_every > 0 {
            return refuse(format!(
                "skip_row_max=1 with exp2_polynomial_every={}: a polynomial's overflow is not seen",
                self.exp2_polynomial_every
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
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use fmha_core::MaskKind;

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
            (&[("f16_scores", "1")], &["f16_scores", "bf16"]),
            (&[("f16_output", "1")], &["f16_output", "bf16"]),
            (&[("pack_gqa", "1")], &["pack_gqa", "3", "128"]),
            (&[("wait_anchor", "100")], &["wait_anchor", "100", "64"]),
            (&[("warp_specialised", "0"), ("ping_pong", "1")], &["ping_pong", "warp_specialised"]),
            (&[("cluster_heads", "1")], &["cluster_heads", "cluster=1"]),
            (&[("cluster", "2"), ("cluster_heads", "1")], &["cluster_heads", "3"]),
            (&[("block_m", "192"), ("copy_bytes", "4")], &["copy_bytes", "4", "block_m", "192"]),
            (&[("lazy_rescale_log2", "0"), ("skip_row_max", "1")], &["skip_row_max", "lazy_rescale_log2"]),
            (
                &[("exp2_polynomial_every", "4"), ("skip_row_max", "1")],
                &["skip_row_max", "exp2_polynomial_every=4"],
            ),
            (&[("blok_n", "1")], &["blok_n", "block_n"]),
        ] {
            let text = refusal(words);
            assert!(names.iter().all(|name| text.contains(name)), "{words:?}: {text}");
        }
    }

    #[test]
    fn every_named_field_can_be_set() {
        let mut tile = default_tile(&FwdSpec::plain(DType::F16, 128, MaskKind::Full));
        for field in FIELDS.split(", ") {
            let values = ["1", "2", "64", "static"];
            assert!(values.iter().any(|value| tile.set(field, value).is_ok()), "{field}");
        }
    }
}
