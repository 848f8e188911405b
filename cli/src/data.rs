//! The user's own data: where it comes from, where results go.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use fmha::{DType, QLayout, Shape, Strides, VLayout};

use crate::failure::Failure;
use crate::files::{Archive, Staged, Tensor, check_npy_dtype, read_npy, stage_npy, stage_safetensors};
use crate::options::{Mode, ProblemArgs};
use crate::setup::{Given, Setup};

/// Files instead of made-up data.
#[derive(Debug, Args)]
#[command(next_help_heading = "Data")]
pub(super) struct DataArgs {
    /// Q: a .npy file, or with --input a tensor's name (default there: q)
    #[arg(long, value_name = "FILE|NAME")]
    q: Option<String>,

    /// K: likewise
    #[arg(long, value_name = "FILE|NAME")]
    k: Option<String>,

    /// V: likewise; with --vlayout c, [batch, dim, heads, seq] or (--iperm) [batch, heads, dim, seq]
    #[arg(long, value_name = "FILE|NAME")]
    v: Option<String>,

    /// A .safetensors file that has them all
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,

    /// Where O goes: .npy, or .safetensors (which takes LSE, or the gradients, too)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Where LSE goes: .npy
    #[arg(long, value_name = "FILE")]
    out_lse: Option<PathBuf>,

    /// What O is to be: a .npy file, or with --input a tensor's name
    #[arg(long, value_name = "FILE|NAME")]
    expect: Option<String>,
}

/// Q, K, V as they were read.
pub(super) struct OwnData {
    pub(super) given: Given,
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    archive: Option<Archive>,
}

impl DataArgs {
    /// Q, K and V, if the user brings them.
    pub(super) fn load(&self, problem: &ProblemArgs) -> Result<Option<OwnData>, Failure> {
        let named = [("q", &self.q), ("k", &self.k), ("v", &self.v)];
        let archive = self.input.as_deref().map(Archive::open).transpose()?;
        let tensors = match &archive {
            Some(archive) => named.map(|(name, chosen)| archive.tensor(chosen.as_deref().unwrap_or(name))),
            None => {
                let missing: Vec<_> =
                    named.iter().filter(|(_, file)| file.is_none()).map(|(n, _)| *n).collect();
                match missing.len() {
                    0 => {}
                    3 => return Ok(None),
                    count => {
                        return Err(Failure::wrong(format!(
                            "{}: {count} of q, k, v missing",
                            missing.join(", ")
                        )));
                    }
                }
                named.map(|(_, file)| read_npy(Path::new(file.as_deref().unwrap_or_default())))
            }
        };
        let [q, k, v] = tensors;
        let (q, k, v) = (q?, k?, v?);
        let rows = if problem.iperm { "bhsd" } else { "bshd" };
        let values = match (problem.vlayout, problem.iperm) {
            (VLayout::RowMajor, _) => rows,
            (VLayout::ColMajor, true) => "bhds",
            (VLayout::ColMajor, false) => "bdhs",
        };
        let given = Given {
            dtype_qk: q.dtype,
            dtype_v: v.dtype,
            q: q.logical("q", rows)?,
            k: k.logical("k", rows)?,
            v: v.logical("v", values)?,
        };
        given.agree(k.dtype)?;
        if problem.mode == Mode::Group && given.q.batch != 1 {
            return Err(Failure::wrong(format!(
                "q: group mode packs its sequences, but batch is {}",
                given.q.batch
            )));
        }
        Ok(Some(OwnData { given, q, k, v, archive }))
    }

    /// Where results go; refuses what could not be written, before anything is computed.
    pub(super) fn outputs(&self, setup: &Setup) -> Result<Outputs, Failure> {
        if let Some(path) = &self.out_lse {
            if !setup.fwd.write_lse || setup.bwd.is_some() {
                return Err(Failure::wrong(format!(
                    "out_lse {}: 0 LSE computed, give --lse",
                    path.display()
                )));
            }
            check_target(path, DType::F32, &["npy"])?;
        }
        if let Some(path) = &self.out {
            let kinds: &[&str] = if setup.bwd.is_some() { &["safetensors"] } else { &["npy", "safetensors"] };
            check_target(path, setup.fwd.dtype_o, kinds)?;
        }
        Ok(Outputs {
            o: self.out.clone(),
            lse: self.out_lse.clone(),
            backward: setup.bwd.is_some(),
            with_lse: setup.fwd.write_lse,
        })
    }

    /// What O is to be, if the user says so, with O's shape.
    pub(super) fn expected(&self, setup: &Setup, own: Option<&OwnData>) -> Result<Option<Tensor>, Failure> {
        let Some(name) = &self.expect else { return Ok(None) };
        if setup.bwd.is_some() {
            return Err(Failure::wrong(format!("expect {name}: --backward computes 0 tensors named O")));
        }
        let tensor = match own.and_then(|own| own.archive.as_ref()) {
            Some(archive) => archive.tensor(name)?,
            None => read_npy(Path::new(name))?,
        };
        let shape = file_shape(setup.extents().o, setup.fwd.o, setup.fwd.q_layout);
        let given: Vec<u64> = tensor.shape.iter().copied().skip_while(|&extent| extent == 1).collect();
        let wanted: Vec<u64> = shape.iter().copied().skip_while(|&extent| extent == 1).collect();
        if given != wanted {
            return Err(Failure::wrong(format!(
                "expect {name} has shape {:?}, but O has {shape:?}",
                tensor.shape
            )));
        }
        Ok(Some(tensor))
    }
}

impl Given {
    /// Refuses tensors that contradict one another.
    fn agree(&self, dtype_k: DType) -> Result<(), Failure> {
        if dtype_k != self.dtype_qk {
            return Err(Failure::wrong(format!("dtype_qk: q is {}, but k is {dtype_k}", self.dtype_qk)));
        }
        for (field, a, (b, of_a, of_b)) in [
            ("batch", self.q.batch, (self.k.batch, "q", "k")),
            ("batch", self.k.batch, (self.v.batch, "k", "v")),
            ("seqlen_k", self.k.seq, (self.v.seq, "k", "v")),
            ("num_heads_kv", self.k.head, (self.v.head, "k", "v")),
            ("head_dim_qk", self.q.dim, (self.k.dim, "q", "k")),
        ] {
            if a != b {
                return Err(Failure::wrong(format!("{field} is {a} in {of_a}, but {b} in {of_b}")));
            }
        }
        Ok(())
    }
}

fn check_target(path: &Path, dtype: DType, kinds: &[&str]) -> Result<(), Failure> {
    let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
    if !kinds.contains(&kind) {
        return Err(Failure::wrong(format!(
            "out {}: `.{kind}` is not .{}",
            path.display(),
            kinds.join(" or .")
        )));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        return Err(Failure::wrong(format!("out {}: {} is no folder", path.display(), folder.display())));
    }
    if kind == "npy" { check_npy_dtype(path, dtype) } else { Ok(()) }
}

/// A dense tensor's shape in a file: its memory order, without a batch axis when it is packed.
pub(super) fn file_shape(shape: Shape, strides: Strides, layout: QLayout) -> Vec<u64> {
    let [batch, seq, head, dim] = [shape.batch, shape.seq, shape.head, shape.dim].map(u64::from);
    // Heads come first iff a step along the sequence is one row.
    let permuted = strides.seq == i64::from(shape.dim) && shape.head > 1;
    let rows = if permuted { vec![head, seq, dim] } else { vec![seq, head, dim] };
    match layout {
        QLayout::Batch => [vec![batch], rows].concat(),
        QLayout::Packed => rows,
    }
}

/// LSE's shape in a file.
pub(super) fn lse_shape(setup: &Setup) -> Vec<u64> {
    let dims = setup.fwd.dims;
    let (batch, heads) = (u64::from(dims.batch), u64::from(dims.num_heads_q));
    match setup.fwd.q_layout {
        QLayout::Batch => vec![batch, heads, u64::from(dims.seqlen_q)],
        QLayout::Packed => vec![heads, u64::from(setup.extents().q.seq)],
    }
}

/// Where results go.
pub(super) struct Outputs {
    o: Option<PathBuf>,
    lse: Option<PathBuf>,
    backward: bool,
    with_lse: bool,
}

impl Outputs {
    /// Writes what was asked for, all of it or nothing; `tensor` gives a result by its name.
    pub(super) fn write(
        &self,
        mut tensor: impl FnMut(&'static str) -> Result<Option<Tensor>, Failure>,
    ) -> Result<Vec<PathBuf>, Failure> {
        let mut staged = Vec::new();
        if let Some(path) = &self.o {
            if path.extension().is_some_and(|kind| kind == "npy") {
                if let Some(o) = tensor("o")? {
                    staged.push(stage_npy(path, &o)?);
                }
            } else {
                let names: &[&'static str] = match (self.backward, self.with_lse) {
                    (true, _) => &["dq", "dk", "dv", "dbias", "dsink"],
                    (false, true) => &["o", "lse"],
                    (false, false) => &["o"],
                };
                let mut tensors = BTreeMap::new();
                for &name in names {
                    tensors.extend(tensor(name)?.map(|tensor| (name.to_owned(), tensor)));
                }
                staged.push(stage_safetensors(path, &tensors)?);
            }
        }
        if let Some(path) = &self.lse
            && let Some(lse) = tensor("lse")?
        {
            staged.push(stage_npy(path, &lse)?);
        }
        staged.into_iter().map(Staged::publish).collect()
    }
}
