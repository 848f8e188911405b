//! Lists of keys from a file: `--lists FILE.npy`.

use std::path::{Path, PathBuf};

use clap::Args;
use fmha::{FwdProblem, KeyLists, KvLayout, ListEntries, ListLength, QLayout, Strides, Totals};

use crate::failure::Failure;
use crate::npy;
use crate::options::{Lengths, at_least_1, lengths};
use crate::setup::join;
use crate::target::read;

/// Lists of keys in place of all keys.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Lists of keys")]
pub(super) struct ListArgs {
    /// Keys that each query sees, in place of all: a .npy file, i32 [batch, seqlen_q, heads_kv, topk] of positions,
    /// packed [total_q, heads_kv, topk]; heads 1 or left out = one list for all; absent: negative, or past the length
    #[arg(long, value_name = "FILE")]
    pub(super) lists: Option<PathBuf>,

    /// Entries of each list that are in use: one number for each sequence (or for all), or a .npy file, i32 [batch]
    /// or [batch, seqlen_q], packed [total_q]
    #[arg(long, visible_alias = "topk_length", value_name = "N[,N..]|FILE", value_parser = in_use)]
    topk_length: Option<InUse>,

    /// Keys of an entry: entry e stands for keys e * N up to (e + 1) * N
    #[arg(long, value_name = "N", value_parser = at_least_1("list_block"), allow_negative_numbers = true)]
    list_block: Option<u32>,

    /// Entries are addresses page * page_size + offset in the pages of all sequences (--page-size)
    #[arg(long)]
    pub(super) list_addresses: bool,

    /// LSE leaves out the sink
    #[arg(long)]
    lse_without_sink: bool,
}

/// Entries in use.
#[derive(Clone, Debug)]
enum InUse {
    Numbers(Lengths),
    File(PathBuf),
}

fn in_use(text: &str) -> Result<InUse, String> {
    match text.ends_with(".npy") {
        true => Ok(InUse::File(text.into())),
        false => lengths("topk_length")(text).map(InUse::Numbers),
    }
}

/// Elements of the tensors of a call's lists.
#[derive(Clone, Debug, Default)]
pub(super) struct ListNumbers {
    pub(super) indices: Vec<i32>,
    pub(super) topk_length: Vec<i32>,
}

impl ListArgs {
    /// Refuses options of lists without lists, and addresses without pages.
    pub(super) fn fit(&self, layout: KvLayout) -> Result<(), Failure> {
        let length = match &self.topk_length {
            None => None,
            Some(InUse::Numbers(numbers)) => Some(join(&numbers.0)),
            Some(InUse::File(path)) => Some(path.display().to_string()),
        };
        let flag = |on: bool| on.then(|| "1".to_owned());
        for (name, value) in [
            ("topk_length", length),
            ("list_block", self.list_block.map(|block| block.to_string())),
            ("list_addresses", flag(self.list_addresses)),
            ("lse_without_sink", flag(self.lse_without_sink)),
        ] {
            if let Some(value) = value.filter(|_| self.lists.is_none()) {
                return Err(Failure::wrong(format!("{name} {value} goes with --lists, which is not given")));
            }
        }
        if self.list_addresses && !layout.is_paged() {
            return Err(Failure::wrong("list_addresses 1 goes with --page-size, which is 0".to_owned()));
        }
        match self.list_block {
            Some(block) if self.list_addresses => Err(Failure::wrong(format!(
                "list_block {block} beside list_addresses, which name single keys"
            ))),
            _ => Ok(()),
        }
    }

    /// Reads the lists into a problem.
    ///
    /// # Errors
    /// A file that is none, and a shape that does not fit the problem, with the axis and both numbers.
    pub(super) fn load(&self, problem: &mut FwdProblem, totals: Totals) -> Result<ListNumbers, Failure> {
        let Some(path) = &self.lists else { return Ok(ListNumbers::default()) };
        let (shape, indices) = integers("lists", path)?;
        let (dims, packed) = (problem.dims, problem.layout.q == QLayout::Packed);
        let (rows_name, tokens): (_, &[(&str, u64)]) = match packed {
            true => ("total_q", &[("total_q", totals.total_q.unwrap_or(0).into())]),
            false => ("seqlen_q", &[("batch", dims.batch.into()), ("seqlen_q", dims.seqlen_q.into())]),
        };
        let wrong = |text: String| Failure::wrong(format!("lists {}: {text}", path.display()));
        let (least, most) = (tokens.len() + 1, tokens.len() + 2);
        if !(least..=most).contains(&shape.len()) {
            let text = format!("rank {} (shape {shape:?}) is not in {least}..={most}", shape.len());
            return Err(wrong(text));
        }
        for (&found, &(name, wanted)) in shape.iter().zip(tokens) {
            if found != wanted {
                return Err(wrong(format!("shape {shape:?} has {found} for {name}, not {wanted}")));
            }
        }
        let heads = if shape.len() == most { shape[most - 2] } else { 1 };
        if heads != 1 && heads != u64::from(dims.num_heads_kv) {
            return Err(wrong(format!(
                "shape {shape:?} has {heads} heads, not 1 or num_heads_kv {}",
                dims.num_heads_kv
            )));
        }
        let topk = shape.last().copied().unwrap_or(0);
        let topk = u32::try_from(topk).map_err(|_| wrong(format!("topk {topk} is not in 0..2^32")))?;
        let head = if heads == 1 { 0 } else { i64::from(topk) };
        let seq = i64::from(topk) * heads.cast_signed();
        let batch = if packed { 0 } else { seq * i64::from(dims.seqlen_q) };
        let (length, topk_length) = self.in_use(problem, totals, rows_name)?;
        let entries = match self.list_block {
            _ if self.list_addresses => ListEntries::Addresses,
            None | Some(1) => ListEntries::Positions,
            Some(size) => ListEntries::Blocks { size },
        };
        problem.lists = Some(
            KeyLists::new(problem, topk)
                .entries(entries)
                .length(length)
                .strides(Strides { batch, seq, head, dim: 1 })
                .lse_without_sink(self.lse_without_sink),
        );
        Ok(ListNumbers { indices, topk_length })
    }

    /// Entries in use, and what they are counted for.
    fn in_use(
        &self,
        problem: &FwdProblem,
        totals: Totals,
        rows_name: &str,
    ) -> Result<(ListLength, Vec<i32>), Failure> {
        let batch = u64::from(problem.dims.batch);
        let per_token: &[u64] = match totals.total_q {
            Some(total_q) => &[total_q.into()],
            None => &[batch, problem.dims.seqlen_q.into()],
        };
        match &self.topk_length {
            None => Ok((ListLength::Whole, Vec::new())),
            Some(InUse::Numbers(numbers)) => {
                let numbers = crate::setup::each("topk_length", numbers, problem.dims.batch)?;
                Ok((ListLength::Sequence, numbers.iter().map(|&number| number as i32).collect()))
            }
            Some(InUse::File(path)) => {
                let (shape, numbers) = integers("topk_length", path)?;
                if shape == per_token {
                    Ok((ListLength::Token, numbers))
                } else if shape == [batch] {
                    Ok((ListLength::Sequence, numbers))
                } else {
                    Err(Failure::wrong(format!(
                        "topk_length {}: shape {shape:?} is neither [{batch}] (batch) nor {per_token:?} ({rows_name})",
                        path.display()
                    )))
                }
            }
        }
    }
}

/// Shape and elements of a file of i32.
fn integers(name: &str, path: &Path) -> Result<(Vec<u64>, Vec<i32>), Failure> {
    npy::decode_i32(read(path)?).map_err(|text| Failure::wrong(format!("{name} {}: {text}", path.display())))
}
