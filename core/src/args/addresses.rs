//! Where a kernel takes its operands: asked at each call, since a plan does not know addresses.

use crate::error::ProblemError;

/// Holds operands to what a kernel's loads and stores ask of addresses. An operand is its name, where it
/// starts, the power of two that this is to be a multiple of, in bytes, and whether it matters in this call.
///
/// # Errors
/// The first operand that starts elsewhere, with its address and the bytes.
#[inline]
pub fn check_addresses<const N: usize>(
    kernel: &str,
    operands: [(&'static str, u64, u64, bool); N],
) -> Result<(), ProblemError> {
    for (name, address, align, matters) in operands {
        if matters && address & (align - 1) != 0 {
            let text = format!(
                "{name} starts at {address:#x}, which is no multiple of the {align} bytes that kernel {kernel} needs"
            );
            return Err(ProblemError::new(name, text));
        }
    }
    Ok(())
}
