//! The user's own data: sources of tensors, and files for results.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use fmha::{Bias, DType, Descale, QLayout, Shape, VLayout};
use fmha_conformance::tensor::Operand;

use crate::failure::Failure;
use crate::files::{Archive, Tensor, check_npy_dtype, read_npy, stage_npy, stage_safetensors};
use crate::options::{BiasChoice, Mode, ProblemArgs};
use crate::setup::{Given, Setup};
use crate::target;

/// Files instead of made-up data.
#[derive(Debug, Args)]
#[command(next_help_heading = "Data")]
pub(super) struct DataArgs {
    /// Q: a .npy file, or with --input a tensor's name (default there: q)
    #[arg(long, value_name = "FILE|NAME")]
    q: Option<String>,

    /// K: as Q
    #[arg(long, value_name = "FILE|NAME")]
    k: Option<String>,

    /// V: as Q; with --vlayout c, [batch, dim, heads, seq] or (--iperm) [batch, heads, dim, seq]
    #[arg(long, value_name = "FILE|NAME")]
    v: Option<String>,

    /// A .safetensors file that has them all
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,

    /// Another input of your own: bias, sink, alibi_slopes, descale_q, descale_k, descale_v, scale_o, dout or
    /// dlse = a .npy file, or with --input a tensor's name (default there: its own)
    #[arg(long = "operand", value_name = "NAME=FILE|NAME", value_parser = operand)]
    operands: Vec<(&'static str, String)>,

    /// Write every input, made up or not, to a .safetensors file that --input takes, before the run
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,

    /// File for O: .npy, or .safetensors (which takes LSE, or the gradients, too); rows beyond a sequence's
    /// length are NaN
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// File for LSE: .npy
    #[arg(long, value_name = "FILE")]
    out_lse: Option<PathBuf>,

    /// File for each row's greatest score, of LSE's shape: .npy; forward writes it then
    #[arg(long, value_name = "FILE")]
    out_row_max: Option<PathBuf>,

    /// File for each head's greatest score, [heads]: .npy
    #[arg(long, value_name = "FILE")]
    out_head_max: Option<PathBuf>,

    /// File for each key's sum of probabilities, [batch, heads, seqlen_k]: .npy
    #[arg(long, value_name = "FILE")]
    out_key_sum: Option<PathBuf>,

    /// Expected O: a .npy file, or with --input a tensor's name
    #[arg(long, value_name = "FILE|NAME")]
    expect: Option<String>,
}

/// Q, K and V as read from the user's file.
pub(super) struct OwnData {
    pub(super) given: Given,
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    archive: Option<Archive>,
    /// Sources of the other operands, if the user has given them.
    chosen: Vec<(&'static str, String)>,
    /// The bias is read early, because its type is part of the problem.
    bias: Option<Tensor>,
}

/// Requirements on the tensor of an input other than Q, K and V.
pub(super) struct Wanted {
    pub(super) name: &'static str,
    pub(super) operand: Operand,
    pub(super) dtype: DType,
    pub(super) shape: Vec<u64>,
}

/// The names that `--operand` takes.
const NAMES: [&str; 9] =
    ["bias", "sink", "alibi_slopes", "descale_q", "descale_k", "descale_v", "scale_o", "dout", "dlse"];

fn operand(text: &str) -> Result<(&'static str, String), String> {
    let (name, file) = text.split_once('=').unwrap_or((text, ""));
    let known = NAMES.into_iter().find(|known| *known == name);
    match known {
        Some(name) if !file.is_empty() => Ok((name, file.to_owned())),
        Some(name) => Err(format!("operand {name}: no file is named; {name}=FILE is wanted")),
        None => Err(format!("operand `{name}` is none of {}", NAMES.join(", "))),
    }
}

/// Inputs of a problem other than Q, K, V and lengths.
pub(super) fn operands_of(setup: &Setup) -> Vec<Wanted> {
    let fwd = &setup.fwd;
    let dims = fwd.dims;
    let (batch, heads) = (u64::from(dims.batch), u64::from(dims.num_heads_q));
    let mut wanted = Vec::new();
    let mut add = |name, operand, dtype, shape| wanted.push(Wanted { name, operand, dtype, shape });
    match fwd.score.bias {
        Bias::None => {}
        Bias::Elementwise(bias) => {
            let shape = fwd.shape_bias(bias.broadcast);
            let shape = [shape.batch, shape.head, shape.seq, shape.dim].map(u64::from).to_vec();
            add("bias", Operand::Bias, bias.dtype, shape);
        }
        Bias::Alibi { per_batch } => {
            let shape = if per_batch { vec![batch, heads] } else { vec![heads] };
            add("alibi_slopes", Operand::AlibiSlopes, DType::F32, shape);
        }
    }
    if fwd.score.sink {
        add("sink", Operand::Sink, DType::F32, vec![heads]);
    }
    for (name, operand, kind) in [
        ("descale_q", Operand::DescaleQ, fwd.scales.descale_q),
        ("descale_k", Operand::DescaleK, fwd.scales.descale_k),
        ("descale_v", Operand::DescaleV, fwd.scales.descale_v),
    ] {
        match kind {
            Descale::None => {}
            Descale::PerTensor => add(name, operand, DType::F32, vec![1]),
            Descale::PerKvHead => add(name, operand, DType::F32, vec![batch, u64::from(dims.num_heads_kv)]),
        }
    }
    if fwd.scales.scale_o && setup.bwd.is_none() {
        add("scale_o", Operand::ScaleO, DType::F32, vec![1]);
    }
    if let Some(bwd) = &setup.bwd {
        let shape = file_shape(setup.extents().o, setup.operm, fwd.layout.q);
        add("dout", Operand::Dout, fwd.dtypes.o, shape);
        if bwd.has_dlse {
            add("dlse", Operand::Dlse, DType::F32, lse_shape(setup));
        }
    }
    wanted
}

impl OwnData {
    /// Tensor of an operand. None is made up if the user has given other tensors but not this one.
    pub(super) fn operand(&self, wanted: &Wanted) -> Result<Tensor, Failure> {
        let Wanted { name, dtype, ref shape, .. } = *wanted;
        let tensor = if name == "bias" && self.bias.is_some() {
            self.bias.clone()
        } else {
            source(name, &self.chosen, self.archive.as_ref())?
        };
        let Some(tensor) = tensor else {
            return Err(Failure::wrong(format!(
                "{name}: q, k and v are yours, but {name} is not given: --operand {name}=FILE"
            )));
        };
        let significant =
            |shape: &[u64]| shape.iter().copied().skip_while(|&extent| extent == 1).collect::<Vec<_>>();
        if significant(&tensor.shape) != significant(shape) {
            return Err(Failure::wrong(format!(
                "operand {name} has shape {:?}, where {shape:?} is wanted",
                tensor.shape
            )));
        }
        if tensor.dtype != dtype {
            return Err(Failure::wrong(format!(
                "operand {name} is {}, where {dtype} is wanted",
                tensor.dtype
            )));
        }
        Ok(tensor)
    }

    /// Checks that every operand of the problem is given, and no other.
    pub(super) fn fits(&self, setup: &Setup) -> Result<(), Failure> {
        let wanted = operands_of(setup);
        for one in &wanted {
            self.operand(one)?;
        }
        for (name, file) in &self.chosen {
            if wanted.iter().all(|wanted| wanted.name != *name) {
                return Err(Failure::wrong(format!(
                    "operand {name}={file}: the problem has no operand of that name (--bias, --sink, --qscale, \
                     --backward, --dlse give it some)"
                )));
            }
        }
        Ok(())
    }
}

/// An operand's tensor: from the source that the user has named, or under its own name in the archive.
fn source(
    name: &str,
    chosen: &[(&'static str, String)],
    archive: Option<&Archive>,
) -> Result<Option<Tensor>, Failure> {
    let said = chosen.iter().rev().find(|(operand, _)| *operand == name).map(|(_, file)| file.as_str());
    let tensor = match (archive, said) {
        (Some(archive), Some(said)) => archive.tensor(said),
        (Some(archive), None) if archive.has(name) => archive.tensor(name),
        (None, Some(said)) => read_npy(Path::new(said), None),
        (_, None) => return Ok(None),
    };
    tensor.map(Some).map_err(|failure| failure.of(&format!("operand {name}")))
}

impl DataArgs {
    /// Q, K and V, if the user gives them.
    pub(super) fn load(&self, problem: &ProblemArgs) -> Result<Option<OwnData>, Failure> {
        let raw = problem.precision;
        let raw_of = |name: &str| raw.map(|raw| if name == "v" { raw.v } else { raw.qk });
        let named = [("q", &self.q), ("k", &self.k), ("v", &self.v)];
        let archive =
            self.input.as_deref().map(Archive::open).transpose().map_err(|failure| failure.of("input"))?;
        let tensors = match &archive {
            Some(archive) => named.map(|(name, chosen)| {
                archive.tensor(chosen.as_deref().unwrap_or(name)).map_err(|failure| failure.of(name))
            }),
            None => {
                let missing: Vec<_> =
                    named.iter().filter(|(_, file)| file.is_none()).map(|(n, _)| *n).collect();
                match missing.len() {
                    0 => {}
                    3 => {
                        if let Some((name, file)) = self.operands.first() {
                            return Err(Failure::wrong(format!(
                                "operand {name}={file}: none of q, k, v is given beside it"
                            )));
                        }
                        return Ok(None);
                    }
                    count => {
                        return Err(Failure::wrong(format!(
                            "{}: {count} of q, k, v missing",
                            missing.join(", ")
                        )));
                    }
                }
                named.map(|(name, file)| {
                    read_npy(Path::new(file.as_deref().unwrap_or_default()), raw_of(name))
                        .map_err(|failure| failure.of(name))
                })
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
        let bias = match problem.bias {
            BiasChoice::Elementwise(_) => source("bias", &self.operands, archive.as_ref())?,
            _ => None,
        };
        let given = Given {
            bias: bias.as_ref().map(|bias| bias.dtype),
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
        let chosen = self.operands.clone();
        Ok(Some(OwnData { given, q, k, v, archive, chosen, bias }))
    }

    /// Small outputs that have a file, by their names.
    fn small(&self) -> [(&'static str, &Option<PathBuf>); 3] {
        [("row_max", &self.out_row_max), ("head_max", &self.out_head_max), ("key_sum", &self.out_key_sum)]
    }

    /// Has the call write the small outputs that have a file.
    pub(super) fn want_outputs(&self, setup: &mut Setup) -> Result<(), Failure> {
        let outputs = &mut setup.fwd.outputs;
        for (to, (_, path)) in
            [&mut outputs.row_max, &mut outputs.head_max, &mut outputs.key_sum].into_iter().zip(self.small())
        {
            *to = path.is_some();
        }
        match (outputs.first(), &setup.bwd) {
            (Some(name), Some(_)) => {
                Err(Failure::wrong(format!("out_{name} goes without --backward, which is given")))
            }
            _ => Ok(()),
        }
    }

    /// Files for results. Refuses those that could not be written, before anything is computed.
    pub(super) fn outputs(&self, setup: &Setup) -> Result<Outputs, Failure> {
        if let Some(path) = &self.out_lse {
            if !setup.fwd.write_lse || setup.bwd.is_some() {
                return Err(Failure::wrong(format!(
                    "out_lse {}: 0 LSE computed, give --lse",
                    path.display()
                )));
            }
            target::check("out_lse", path, &["npy"])?;
        }
        for (name, path) in self.small() {
            if let Some(path) = path {
                target::check(&format!("out_{name}"), path, &["npy"])?;
            }
        }
        if let Some(path) = &self.out {
            let kinds: &[&str] = if setup.bwd.is_some() { &["safetensors"] } else { &["npy", "safetensors"] };
            target::check("out", path, kinds)?;
            if path.extension().is_some_and(|kind| kind == "npy") {
                check_npy_dtype(path, setup.fwd.dtypes.o)?;
            }
        }
        if let Some(path) = &self.export {
            target::check("export", path, &["safetensors"])?;
        }
        self.distinct()?;
        Ok(Outputs {
            o: self.out.clone(),
            lse: self.out_lse.clone(),
            small: self.small().map(|(name, path)| (name, path.clone())),
            backward: setup.bwd.is_some(),
            with_lse: setup.fwd.write_lse,
        })
    }

    /// Checks that no output is another output, or a file that is read.
    fn distinct(&self) -> Result<(), Failure> {
        let mut outputs = Vec::new();
        for (option, path) in [
            ("out", &self.out),
            ("out_lse", &self.out_lse),
            ("out_row_max", &self.out_row_max),
            ("out_head_max", &self.out_head_max),
            ("out_key_sum", &self.out_key_sum),
            ("export", &self.export),
        ] {
            outputs.extend(path.as_deref().map(|path| (option, path)));
        }
        let mut inputs = Vec::new();
        match &self.input {
            Some(archive) => inputs.push(("input", archive.as_path())),
            None => {
                let files = [("q", &self.q), ("k", &self.k), ("v", &self.v), ("expect", &self.expect)];
                for (option, file) in files {
                    inputs.extend(file.as_deref().map(|file| (option, Path::new(file))));
                }
                inputs.extend(self.operands.iter().map(|(name, file)| (*name, Path::new(file))));
            }
        }
        target::distinct(&outputs, &inputs)
    }

    /// Writes every input, where that is wanted.
    pub(super) fn write_inputs(
        &self,
        inputs: impl FnOnce() -> BTreeMap<String, Tensor>,
    ) -> Result<Option<PathBuf>, Failure> {
        let Some(path) = &self.export else { return Ok(None) };
        stage_safetensors(path, &inputs())?.publish().map(Some)
    }

    /// Expected O with O's shape, if the user gives one.
    pub(super) fn expected(&self, setup: &Setup, own: Option<&OwnData>) -> Result<Option<Tensor>, Failure> {
        let Some(name) = &self.expect else { return Ok(None) };
        if setup.bwd.is_some() {
            return Err(Failure::wrong(format!("expect {name}: --backward computes no O")));
        }
        let tensor = match own.and_then(|own| own.archive.as_ref()) {
            Some(archive) => archive.tensor(name),
            None => read_npy(Path::new(name), Some(setup.fwd.dtypes.o)),
        };
        let tensor = tensor.map_err(|failure| failure.of("expect"))?;
        let shape = file_shape(setup.extents().o, setup.operm, setup.fwd.layout.q);
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

/// A dense tensor's shape in a file, in memory order: heads before rows if it is permuted, without a batch axis if
/// it is packed.
pub(super) fn file_shape(shape: Shape, permuted: bool, layout: QLayout) -> Vec<u64> {
    let [batch, seq, head, dim] = [shape.batch, shape.seq, shape.head, shape.dim].map(u64::from);
    let rows = if permuted { vec![head, seq, dim] } else { vec![seq, head, dim] };
    of_batch(batch, rows, layout)
}

/// Shape of a file with a column-major V.
pub(super) fn col_major_shape(shape: Shape, permuted: bool, layout: QLayout) -> Vec<u64> {
    let [batch, seq, head, dim] = [shape.batch, shape.seq, shape.head, shape.dim].map(u64::from);
    let rows = if permuted { vec![head, dim, seq] } else { vec![dim, head, seq] };
    of_batch(batch, rows, layout)
}

fn of_batch(batch: u64, rows: Vec<u64>, layout: QLayout) -> Vec<u64> {
    match layout {
        QLayout::Batch => [vec![batch], rows].concat(),
        QLayout::Packed => rows,
    }
}

/// LSE's shape in a file.
pub(super) fn lse_shape(setup: &Setup) -> Vec<u64> {
    let dims = setup.fwd.dims;
    let (batch, heads) = (u64::from(dims.batch), u64::from(dims.num_heads_q));
    match setup.fwd.layout.q {
        QLayout::Batch => vec![batch, heads, u64::from(dims.seqlen_q)],
        QLayout::Packed => vec![heads, u64::from(setup.extents().q.seq)],
    }
}

/// Files for results.
pub(super) struct Outputs {
    o: Option<PathBuf>,
    lse: Option<PathBuf>,
    small: [(&'static str, Option<PathBuf>); 3],
    backward: bool,
    with_lse: bool,
}

impl Outputs {
    /// Writes the requested files, all of them or none; `tensor` returns a result by its name.
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
        for (name, path) in &self.small {
            if let Some(path) = path
                && let Some(output) = tensor(name)?
            {
                staged.push(stage_npy(path, &output)?);
            }
        }
        target::publish(staged)
    }
}
