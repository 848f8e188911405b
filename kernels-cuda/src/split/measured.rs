//! Rows of `measured.tsv`: times of calls with few queries on a device, for different ways to divide their keys.

use fmha_core::{DType, Dims, FwdProblem, KvLayout, MaskSpec, ValidFwd};

use super::price::{Constants, Keys, Walk};
use crate::sm80::{self, Room};
use crate::sm90;

/// The device that was measured, an H200.
pub const ROOM: Room = Room { smem_bytes: 232_448, num_sms: 132 };

/// A call: a row without the way in which it was computed and its time.
#[derive(Clone, Debug)]
pub struct Call {
    /// The columns, which name the call.
    pub name: String,
    /// The problem in the form for which a plan is made.
    pub problem: ValidFwd,
}

impl Call {
    /// A call by its columns: batch, `HEADS/HEADS_KV`, queries, lengths (`N` of all, or `SHORTEST..LONGEST` that the
    /// device alone knows), head dimension, rows of a page or `-`.
    ///
    /// # Errors
    /// The columns that cannot be parsed.
    pub fn parsed(columns: &[&str]) -> Result<Self, String> {
        let name = columns.join(" ");
        let whole = || {
            let &[batch, heads, queries, lengths, head_dim, page] = columns else { return None };
            let (num_heads_q, num_heads_kv) = heads.split_once('/')?;
            let longest = lengths.split_once("..").map_or(lengths, |(_, longest)| longest);
            let head_dim = head_dim.parse().ok()?;
            let dims = Dims::batch(batch.parse().ok()?)
                .seqlens(queries.parse().ok()?, longest.parse().ok()?)
                .heads(num_heads_q.parse().ok()?, num_heads_kv.parse().ok()?)
                .head_dim(head_dim);
            let mut problem = FwdProblem::batch(DType::Bf16, dims).mask(MaskSpec::CAUSAL);
            problem.layout.seqused_k = lengths.contains("..");
            if page != "-" {
                problem.layout.kv = KvLayout::Paged { page_size: page.parse().ok()? };
            }
            problem.validate().ok()
        };
        whole().map(|problem| Self { name: name.clone(), problem }).ok_or(format!("no call: {name}"))
    }

    /// All ways in which kernels can compute the call: the kernel, its tile in words, and the input of a price.
    #[must_use]
    pub fn ways(&self) -> Vec<(&'static str, String, Walk)> {
        let problem = &self.problem;
        let of_sm80 = sm80::ways_of_few(problem, ROOM).into_iter().map(|tile| {
            let words = format!(
                "block_m={},block_n={},warps={},stages={},ctas={},split_keys={},shares={},shares_a_cta={}",
                tile.block_m,
                tile.block_n,
                tile.warps,
                tile.stages,
                tile.ctas,
                tile.split_keys,
                tile.shares,
                tile.shares_a_cta
            );
            (sm80::NAME, words, tile.walk(problem))
        });
        let is_read = sm90::reads_as_it_lies(problem);
        let of_sm90 = if is_read { sm90::ways_of_few(problem, ROOM.num_sms) } else { Vec::new() };
        let of_sm90 = of_sm90.into_iter().filter_map(|tile| {
            let words = format!(
                "block_m={},block_n={},split_keys={},shares={}",
                tile.block_m, tile.block_n, tile.split_keys, tile.shares
            );
            Some((sm90::NAME, words, sm90::walk_of_few(problem, &tile)?))
        });
        of_sm80.chain(of_sm90).collect()
    }
}

/// A measured row.
#[derive(Clone, Debug)]
pub struct Row {
    /// The name of the run; only rows of one run are comparable.
    pub run: String,
    /// Call that was measured.
    pub call: Call,
    /// Mean number of keys of a sequence, relative to the longest.
    pub mean: f64,
    /// Name of the kernel that was measured.
    pub kernel: String,
    /// How the keys of a tile were divided among CTAs.
    pub keys: Keys,
    /// Measured time in microseconds.
    pub micros: f64,
}

impl Row {
    /// The row's way to divide keys, with its kernel's constants.
    #[must_use]
    pub fn walk(&self, constants: &Constants) -> Option<Walk> {
        let ways = self.call.ways();
        let walk =
            ways.into_iter().find(|(kernel, _, walk)| *kernel == self.kernel && walk.keys == self.keys)?.2;
        let rates = if self.kernel == sm80::NAME { constants.sm80 } else { constants.sm90 };
        Some(Walk { rates, ..walk })
    }
}

/// All rows of `measured.tsv`.
///
/// # Errors
/// The line that is no row.
pub fn rows() -> Result<Vec<Row>, String> {
    let row = |line: &str| {
        let columns: Vec<&str> = line.split('\t').collect();
        let &[run, _, batch, heads, queries, lengths, mean, head_dim, page, kernel, keys, micros] =
            columns.as_slice()
        else {
            return Err(format!("twelve columns: {line}"));
        };
        let call = Call::parsed(&[batch, heads, queries, lengths, head_dim, page])?;
        let keys = Keys::parsed(keys).ok_or_else(|| format!("keys {keys}: {line}"))?;
        let micros = micros.parse().map_err(|_| format!("us {micros}: {line}"))?;
        let mean: f64 = mean.parse().map_err(|_| format!("mean {mean}: {line}"))?;
        let mean = mean / f64::from(call.problem.dims.seqlen_k);
        Ok(Row { run: run.to_owned(), call, mean, kernel: kernel.to_owned(), keys, micros })
    };
    let lines = include_str!("measured.tsv").lines();
    lines.filter(|line| !line.starts_with('#')).map(row).collect()
}
