//! Alignment of operands, checked at each call, because a plan has no addresses.

use crate::error::ProblemError;

/// Checks that operands are aligned as a kernel's loads and stores need it. An operand is a name, an address, a
/// power of two in bytes (the address must be a multiple of it), and whether this call uses the operand.
///
/// # Errors
/// The first operand with another alignment, with its address and the bytes.
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
