//! The loss of an indexer and its gradients: from the C struct to the problem, its plan and its operands.

use std::ffi::c_char;

use fmha::sparse::IndexLossProblem;
use fmha::{
    Backend, DType, DevSliceMut, Device, ElemType, Error, IndexLossArgs, IndexLossPlan, PlanOptions,
    ProblemError,
};

use crate::Result;
use crate::host::{dtype, flag, size, struct_bytes, text};
use crate::plan::{Memory, present};
use crate::structs::FmhaIndexLoss;

/// Computes a call on the device of a name.
///
/// # Safety
/// As [`crate::fmha_index_loss`].
pub(crate) unsafe fn on(name: *const c_char, call: &FmhaIndexLoss) -> Result<()> {
    // SAFETY: the caller keeps the contract of `on`.
    unsafe {
        let plan = plan_index_loss(&device(name)?, call)?;
        run_index_loss(&plan, call)
    }
}

/// Bytes of scratch that a call wants on the device of a name.
///
/// # Safety
/// `name` is null or a C string.
pub(crate) unsafe fn workspace_on(name: *const c_char, call: &FmhaIndexLoss) -> Result<u64> {
    // SAFETY: the caller keeps the contract of `workspace_on`.
    Ok(plan_index_loss(&unsafe { device(name) }?, call)?.workspace().bytes)
}

/// The device of a name; null: the CPU.
///
/// # Safety
/// `name` is null or a C string.
unsafe fn device(name: *const c_char) -> Result<Device> {
    // SAFETY: the caller keeps the contract of `device`.
    match unsafe { text("device", name)? } {
        None => Backend::Cpu,
        Some(name) => name.parse()?,
    }
    .open()
}

/// Type of an operand that has gradients.
fn trained(field: &'static str, code: i32) -> Result<DType, ProblemError> {
    let found = dtype(field, code)?;
    if matches!(found, DType::F32 | DType::F16 | DType::Bf16) {
        return Ok(found);
    }
    Err(ProblemError::new(
        field,
        format!("{field} {found} is none of f32, f16 and bf16, which have gradients"),
    ))
}

/// Plans a call, whose addresses are asked only whether they are there.
///
/// # Errors
/// The first number that is wrong, by its name; that no kernel of the device takes it.
pub fn plan_index_loss(device: &Device, call: &FmhaIndexLoss) -> Result<IndexLossPlan, Error> {
    struct_bytes::<FmhaIndexLoss>(call.struct_bytes)?;
    let sizes = [
        size("batch", call.batch)?,
        size("seqlen_q", call.seqlen_q)?,
        size("seqlen_k", call.seqlen_k)?,
        size("topk", call.topk)?,
    ];
    let heads = [size("num_heads", call.num_heads)?, size("head_dim", call.head_dim)?];
    let dtypes = [trained("dtype_q", call.dtype_q)?, trained("dtype_k", call.dtype_k)?];
    let problem = IndexLossProblem::new(sizes, heads, dtypes)
        .dloss(!call.dloss.is_null())
        .write_loss(!call.loss.is_null())
        .write_dq(!call.dq.is_null())
        .write_dk(!call.dk.is_null())
        .write_dweights(!call.dweights.is_null());
    let options = PlanOptions::default()
        .deterministic(flag("deterministic", call.deterministic)?)
        .allow_fallback(flag("allow_fallback", call.allow_fallback)?);
    device.plan_index_loss(&problem.validate()?, &options)
}

/// Queues a call by its plan.
///
/// # Errors
/// The first pointer that is wrong, by its name; memory that the system refuses; what the driver said.
///
/// # Safety
/// Pointers of `call` are null or memory of the plan's device that is as large as it says, of which nobody else uses
/// what is written until the work is done; its stream is null or one of the device.
pub unsafe fn run_index_loss(plan: &IndexLossPlan, call: &FmhaIndexLoss) -> Result<(), Error> {
    let (problem, memory) = (plan.problem(), Memory::of(plan.device()));
    let (rows, keys, dim) = (problem.rows(), problem.keys(), u64::from(problem.head_dim));
    let heads = rows.saturating_mul(problem.num_heads.into());
    let entries = rows.saturating_mul(problem.topk.into()).saturating_mul(4);
    let (q, k) = (heads.saturating_mul(dim), keys.saturating_mul(dim));
    let of = |elems: u64, dtype: DType| elems.saturating_mul(dtype.size_bytes());
    let f32s = |elems: u64| of(elems, DType::F32);
    // SAFETY: the caller keeps the contract of `run_index_loss`.
    unsafe {
        let operands = [
            memory.needed("q", call.q, of(q, problem.dtype_q), problem.dtype_q)?,
            memory.needed("k", call.k, of(k, problem.dtype_k), problem.dtype_k)?,
            memory.needed("weights", call.weights, f32s(heads), DType::F32)?,
        ];
        let indices = memory.needed("indices", call.indices, entries, ElemType::I32)?;
        let target = memory.needed("target", call.target, entries, DType::F32)?;
        let float = DType::F32;
        let scratch = scratch(memory, call, plan.workspace().bytes)?;
        let mut args = IndexLossArgs::new(operands, indices, target)
            .dloss(memory.read_if("dloss", problem.has_dloss, call.dloss, f32s(rows), float)?)
            .loss(memory.write_if("loss", problem.write_loss, call.loss, f32s(rows), float)?)
            .dq(memory.write_if("dq", problem.write_dq, call.dq, f32s(q), float)?)
            .dk(memory.write_if("dk", problem.write_dk, call.dk, f32s(k), float)?)
            .dweights(memory.write_if(
                "dweights",
                problem.write_dweights,
                call.dweights,
                f32s(heads),
                float,
            )?)
            .workspace(scratch);
        plan.run_on_raw(&mut args, call.stream as u64)
    }
}

/// The scratch of a run that wants some.
///
/// # Safety
/// As [`run_index_loss`].
unsafe fn scratch<'a>(
    memory: Memory,
    call: &FmhaIndexLoss,
    wanted: u64,
) -> Result<Option<DevSliceMut<'a>>, ProblemError> {
    if wanted == 0 {
        return Ok(None);
    }
    present("workspace", call.workspace, wanted)?;
    let bytes = call.workspace_bytes;
    if bytes < wanted {
        let text = format!("workspace_bytes {bytes} is less than the {wanted} that are needed");
        return Err(ProblemError::new("workspace_bytes", text));
    }
    // SAFETY: not null, and the caller keeps the rest of the contract of `scratch`.
    Ok(Some(unsafe { memory.write(call.workspace.cast(), bytes, ElemType::Scratch) }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use std::ptr::{null, null_mut};

    use super::*;
    use crate::tests::{new, with};
    use crate::{FMHA_E4M3FN, FMHA_F32, fmha_index_loss, fmha_index_loss_workspace};

    #[test]
    fn losses_and_gradients_are_those_of_the_definition() {
        let (q, k) = ([1f32, 2.0], [2f32, 3.0, 2.0]);
        let (weights, indices, target) = ([1f32, 0.5], [0, 2, -1, 1, 9, 1], [1f32, 3.0, 9.0, 0.0, 1.0, 0.0]);
        let mut loss = [7f32; 2];
        let (mut dq, mut dk, mut dweights) = ([7f32; 2], [7f32; 3], [7f32; 2]);
        let call = with!(
            new!(FmhaIndexLoss),
            batch = 1,
            seqlen_q = 2,
            seqlen_k = 3,
            topk = 3,
            num_heads = 1,
            head_dim = 1,
            q = q.as_ptr().cast(),
            k = k.as_ptr().cast(),
            weights = weights.as_ptr(),
            indices = indices.as_ptr(),
            target = target.as_ptr(),
            loss = loss.as_mut_ptr(),
            dq = dq.as_mut_ptr(),
            dk = dk.as_mut_ptr(),
            dweights = dweights.as_mut_ptr(),
            dtype_q = FMHA_F32,
            dtype_k = FMHA_F32
        );
        // SAFETY: all pointers point to live memory of the sizes that the call states.
        assert_eq!(unsafe { fmha_index_loss(c"cpu".as_ptr(), &raw const call) }, 0);
        let wanted = 0.25 * 0.5f32.ln() + 0.75 * 1.5f32.ln();
        assert!((loss[0] - wanted).abs() < 1e-6 && loss[1] == 0.0, "{loss:?}");
        assert_eq!((dq, dk, dweights), ([0.0; 2], [0.25, 0.0, -0.25], [0.0; 2]));

        let halves = [0.5f32, 1.0];
        let scaled = with!(call, dloss = halves.as_ptr(), loss = null_mut(), dq = null_mut());
        // SAFETY: all pointers point to live memory of the sizes that the call states.
        assert_eq!(unsafe { fmha_index_loss(null(), &raw const scaled) }, 0);
        assert_eq!(dk, [0.125, 0.0, -0.125]);

        for (wrong, said) in [
            (with!(call, struct_bytes = 8), "struct_bytes 8 is not sizeof(FmhaIndexLoss)"),
            (with!(call, topk = -1), "topk -1 is not in 0..2^32"),
            (with!(call, num_heads = 0), "num_heads 0 is not in 1..=4096"),
            (with!(call, deterministic = 2), "deterministic 2 is neither 0 nor 1"),
            (with!(call, dtype_k = FMHA_E4M3FN), "dtype_k e4m3fn is none of f32, f16 and bf16"),
            (with!(call, target = null()), "target is null, but 24 bytes are needed"),
            (with!(call, batch = 1 << 20, seqlen_q = 1 << 20), "batch 1048576 of seqlen_q 1048576"),
        ] {
            // SAFETY: refused before anything is read.
            let error = unsafe { on(c"cpu".as_ptr(), &wrong) }.unwrap_err().to_string();
            assert!(error.contains(said), "{error}, not {said}");
        }
        let mut bytes = 7;
        // SAFETY: the name is a C string, the call and the number are alive.
        assert_eq!(unsafe { fmha_index_loss_workspace(null(), &raw const call, &raw mut bytes) }, 0);
        assert_eq!(bytes, 0);
    }
}
