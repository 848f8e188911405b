//! Conversion of a tensor to a format with scales by blocks: makes the C structs from a call's numbers and addresses.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex};

use fmha_c::{Choice, FmhaPlan, FmhaQuantizeArgs, FmhaQuantizeProblem, FmhaStrides};
use fmha_core::fork::PerProcess;

use crate::call::{Key, Wrong, ensure, word};
use crate::plans::{Kept, kept_or_made, said};
use crate::tensor::Device;

/// Declares a struct of 8-byte words, numbers and then addresses, and a list of their names, from which Python makes
/// the same struct.
macro_rules! words {
    (numbers: $($number:ident)+; addresses: $($address:ident)+;) => {
        /// A conversion as Python passes it. Absent tensors have null addresses.
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct Quantize {
            $($number: i64,)+
            $($address: *mut c_void,)+
            /// Stream of the device; 0 is its default stream.
            stream: i64,
        }

        /// Names of the numbers and of the addresses, in order.
        pub const NAMES: [&str; 2] = [
            concat!($(stringify!($number), " "),+),
            concat!($(stringify!($address), " "),+),
        ];

        impl Quantize {
            /// Key of a plan: everything of the call that the plan depends on.
            fn key(&self) -> Key {
                // No key of attention, a merge or a choice begins with this word.
                let mut key = Key::from_slice(&[u64::MAX - 7]);
                key.extend([$(self.$number),+].map(word));
                key
            }
        }
    };
}

words! {
    numbers: batch seqlen num_heads dim x_batch x_seqlen x_head x_dim elements_batch elements_seqlen elements_head
        elements_dim scales_batch scales_seqlen scales_head scales_dim dtype format blocks_of_rows pairs_of_rows
        scale_of_tensor device_kind device_index;
    addresses: x elements scales tensor_scale written_scale;
}

/// Plans of conversions by the numbers of their calls. The scratch belongs to the caller.
static PLANS: PerProcess<Kept<FmhaPlan>> = PerProcess::of_first(Mutex::new(None));

/// Converts a code to 32 bits. A larger number becomes a code that the library does not know.
fn code(value: i64) -> i32 {
    i32::try_from(value).unwrap_or(-1)
}

impl Quantize {
    fn problem(&self) -> FmhaQuantizeProblem {
        let strides = |batch_stride, seqlen_stride, head_stride, dim_stride| FmhaStrides {
            batch_stride,
            seqlen_stride,
            head_stride,
            dim_stride,
        };
        FmhaQuantizeProblem {
            struct_bytes: size_of::<FmhaQuantizeProblem>() as u64,
            batch: self.batch,
            seqlen: self.seqlen,
            num_heads: self.num_heads,
            dim: self.dim,
            x: strides(self.x_batch, self.x_seqlen, self.x_head, self.x_dim),
            elements: strides(
                self.elements_batch,
                self.elements_seqlen,
                self.elements_head,
                self.elements_dim,
            ),
            scales: strides(self.scales_batch, self.scales_seqlen, self.scales_head, self.scales_dim),
            dtype: code(self.dtype),
            format: code(self.format),
            blocks_of_rows: code(self.blocks_of_rows),
            pairs_of_rows: code(self.pairs_of_rows),
            scale_of_tensor: code(self.scale_of_tensor),
            reserved: 0,
        }
    }

    fn plan(&self) -> Result<Arc<FmhaPlan>, Wrong> {
        let device = Device { kind: code(self.device_kind), index: code(self.device_index) };
        kept_or_made(&PLANS, self.key(), device, |device| {
            let choice = Choice { caller_workspace: true, ..Choice::default() };
            said(FmhaPlan::quantize(device, &self.problem(), &choice))
        })
    }
}

/// Bytes of scratch that a run of a conversion needs.
///
/// # Errors
/// A fault of the call, or why no kernel takes it.
pub fn workspace_bytes(call: &Quantize) -> Result<u64, Wrong> {
    Ok(call.plan()?.workspace_bytes())
}

/// Queues a conversion on its stream, with scratch of as many bytes as [`workspace_bytes`] says.
///
/// # Errors
/// As [`workspace_bytes`]; an error of the driver.
///
/// # Safety
/// Addresses are null or memory of the device as large as the numbers say, and so is the scratch, which nobody else
/// uses until the work is done.
pub unsafe fn run(call: &Quantize, workspace: *mut u8, bytes: u64) -> Result<(), Wrong> {
    let plan = call.plan()?;
    let wanted = plan.workspace_bytes();
    ensure!(wanted <= bytes, "workspace has {bytes} bytes, but {wanted} are wanted");
    let args = FmhaQuantizeArgs {
        struct_bytes: size_of::<FmhaQuantizeArgs>() as u64,
        stream: ptr::with_exposed_provenance_mut(word(call.stream) as usize),
        x: call.x,
        elements: call.elements.cast(),
        scales: call.scales.cast(),
        tensor_scale: call.tensor_scale.cast(),
        written_scale: call.written_scale.cast(),
        workspace: if wanted > 0 { workspace.cast() } else { ptr::null_mut() },
        workspace_bytes: if wanted > 0 { bytes } else { 0 },
    };
    // SAFETY: the caller keeps the contract of `run`.
    said(unsafe { plan.run_quantize(&args) })
}
