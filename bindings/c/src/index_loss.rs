//! Computes the loss of an indexer and its gradients, in host memory.

use std::ffi::c_char;

use fmha::sparse::{Candidates, IndexArgs, IndexCall, IndexProblem, index_gradients, index_losses};
use fmha::{DType, DevSlice, Error, ProblemError};

use crate::Result;
use crate::host::{dtype, size, struct_bytes, text};
use crate::plan::present;
use crate::structs::FmhaIndexLoss;

/// Computes a call on the device of a name.
///
/// # Safety
/// As [`crate::fmha_index_loss`].
pub(crate) unsafe fn on(device: *const c_char, call: &FmhaIndexLoss) -> Result<()> {
    // SAFETY: the caller keeps the contract of `on`.
    match unsafe { text("device", device)? } {
        // SAFETY: the caller keeps the contract of `on`.
        None | Some("cpu") => unsafe { index_loss(call) },
        Some(other) => {
            let said =
                format!("device {other}: no kernel of a GPU computes an indexer's loss, which the CPU does");
            Err(ProblemError::new("device", said).into())
        }
    }
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

/// Computes a call on the CPU.
///
/// # Errors
/// The first number or pointer that is wrong, by its name; memory that the system refuses.
///
/// # Safety
/// Pointers of `call` are null or memory as large as it says.
pub unsafe fn index_loss(call: &FmhaIndexLoss) -> Result<(), Error> {
    struct_bytes::<FmhaIndexLoss>(call.struct_bytes)?;
    let problem = IndexProblem {
        batch: size("batch", call.batch)?,
        seqlen_q: size("seqlen_q", call.seqlen_q)?,
        seqlen_k: size("seqlen_k", call.seqlen_k)?,
        num_heads: size("num_heads", call.num_heads)?,
        head_dim: size("head_dim", call.head_dim)?,
        dtype_q: trained("dtype_q", call.dtype_q)?,
        dtype_k: trained("dtype_k", call.dtype_k)?,
    };
    let topk = size("topk", call.topk)? as usize;
    let of = |field: &'static str, factors: &[u32]| {
        let count = factors.iter().try_fold(4u64, |count, &by| count.checked_mul(by.into()));
        let fits = count.and_then(|bytes| isize::try_from(bytes).ok());
        fits.map(|bytes| bytes.unsigned_abs() / 4).ok_or_else(|| {
            ProblemError::new(field, format!("{field} of shape {factors:?} is larger than memory"))
        })
    };
    let IndexProblem { batch, seqlen_q, seqlen_k, num_heads, head_dim, dtype_q, dtype_k } = problem;
    let rows = of("loss", &[batch, seqlen_q])?;
    let (q, k) = (of("q", &[batch, seqlen_q, num_heads, head_dim])?, of("k", &[batch, seqlen_k, head_dim])?);
    let weights = of("weights", &[batch, seqlen_q, num_heads])?;
    let entries = of("indices", &[batch, seqlen_q, topk as u32])?;
    // SAFETY: the caller keeps the contract of `index_loss`.
    let (of_q, of_k, weights, indices, target) = unsafe {
        (
            read("q", call.q.cast::<u8>(), q * dtype_q.size_bytes() as usize)?,
            read("k", call.k.cast::<u8>(), k * dtype_k.size_bytes() as usize)?,
            read("weights", call.weights, weights)?,
            read("indices", call.indices, entries)?,
            read("target", call.target, entries)?,
        )
    };
    // SAFETY: bytes of host memory that were read above, of the types that the call says.
    let (of_q, of_k) = unsafe {
        let slice = |bytes: &[u8], dtype: DType| {
            DevSlice::from_raw(fmha::MemorySpace::Host, bytes.as_ptr(), bytes.len() as u64, dtype)
        };
        (slice(of_q, dtype_q), slice(of_k, dtype_k))
    };
    let args = IndexArgs { q: of_q, k: of_k, weights, k_scale: None, candidates: Candidates::All };
    let index = IndexCall::new(problem, args)?;
    let (losses, mut gradients) = index_losses(&index, (indices, topk), target)?;
    if !call.dloss.is_null() {
        // SAFETY: the caller keeps the contract of `index_loss`.
        let factors = unsafe { read("dloss", call.dloss, rows)? };
        for (row, factor) in factors.iter().enumerate() {
            gradients[row * topk..(row + 1) * topk].iter_mut().for_each(|gradient| *gradient *= factor);
        }
    }
    let wants = [call.dq, call.dk, call.dweights].iter().any(|at| !at.is_null());
    let made = wants.then(|| index_gradients(&index, (indices, topk), &gradients)).transpose()?;
    // SAFETY: the caller keeps the contract of `index_loss`.
    unsafe {
        write(call.loss, &losses);
        if let Some(made) = &made {
            write(call.dq, &made.q);
            write(call.dk, &made.k);
            write(call.dweights, &made.weights);
        }
    }
    Ok(())
}

/// Reads an operand with this many elements.
///
/// # Safety
/// `at` is null or memory of that many elements.
unsafe fn read<'a, T>(name: &'static str, at: *const T, count: usize) -> Result<&'a [T], ProblemError> {
    present(name, at, (count * size_of::<T>()) as u64)?;
    if count == 0 {
        return Ok(&[]);
    }
    if !at.is_aligned() {
        return Err(ProblemError::new(name, format!("{name} is not aligned to {} bytes", align_of::<T>())));
    }
    // SAFETY: not null and aligned, and the caller keeps the rest of the contract of `read`.
    Ok(unsafe { std::slice::from_raw_parts(at, count) })
}

/// Writes an output that is wanted, in f32.
///
/// # Safety
/// `at` is null or memory of as many elements as `values`.
unsafe fn write(at: *mut f32, values: &[f64]) {
    if at.is_null() {
        return;
    }
    for (i, &value) in values.iter().enumerate() {
        // SAFETY: the caller keeps the contract of `write`.
        unsafe { at.add(i).write_unaligned(value as f32) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use std::ptr::{null, null_mut};

    use super::*;
    use crate::tests::{new, with};
    use crate::{FMHA_E4M3FN, FMHA_F32, fmha_index_loss};

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
            (with!(call, num_heads = 0), "num_heads 0 is not at least 1"),
            (with!(call, dtype_k = FMHA_E4M3FN), "dtype_k e4m3fn is none of f32, f16 and bf16"),
            (with!(call, target = null()), "target is null, but 24 bytes are needed"),
            (with!(call, batch = i64::from(u32::MAX), seqlen_q = 1 << 30), "is larger than memory"),
        ] {
            // SAFETY: refused before anything is read.
            let error = unsafe { index_loss(&wrong) }.unwrap_err().to_string();
            assert!(error.contains(said), "{error}, not {said}");
        }
        // SAFETY: refused before anything is read; the name is a C string.
        let error = unsafe { on(c"cuda:1".as_ptr(), &call) }.unwrap_err().to_string();
        assert!(error.contains("device cuda:1: no kernel of a GPU"), "{error}");
    }
}
