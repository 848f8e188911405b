//! A scheme's program on one rank, and the memory that it has for itself.

use fmha::{DevBuffer, Device, MemorySpace, PlanOptions};

use crate::arrivals::{Coming, page};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::problem::{Gradients, Whole};
use crate::program::{Buf, Program, Scratch};
use crate::scheme::Scheme;

pub(super) struct Built {
    pub(super) program: Program,
    pub(super) scratch: Vec<DevBuffer>,
    /// Workspace of each stream that attention is launched on.
    pub(super) workspaces: [Option<DevBuffer>; 2],
}

impl Built {
    /// # Errors
    /// What this rank's device has no kernel for, or no memory; an exchange that the group would refuse.
    pub(super) fn new(
        whole: &Whole,
        scheme: Scheme,
        gradients: Option<Gradients>,
        group: &dyn Group,
        device: &Device,
        options: &PlanOptions,
    ) -> Result<Self> {
        let wrong = |field, text| Err(Error::new(whole.rank, field, text));
        let (space, moved) = (device.memory().space(), group.space());
        if space != moved {
            let text = format!("device computes in {space:?} memory, but the group moves {moved:?} memory");
            return wrong("device", text);
        }
        let program = match gradients {
            None => scheme.forward(whole, device, options),
            Some(gradients) => scheme.backward(whole, gradients, device, options),
        }?;
        let (rows, most) = (program.most_rows(), group.most_rows());
        if rows > most {
            let text = format!(
                "{scheme}: an exchange of {rows} rows is more than the {most} that are sent one by one"
            );
            return wrong("scheme", text);
        }
        let page = if whole.flags { page(device) } else { 1 };
        let alloc = |bytes: u64| {
            let bytes = bytes.max(1).next_multiple_of(page);
            alloc(device, bytes).map_err(|error| Error::of(whole.rank, &error))
        };
        let mut scratch: Vec<DevBuffer> = Vec::new();
        for &Scratch { bytes, within } in &program.scratch {
            let buffer = match within.and_then(|(of, offset)| Some((scratch.get(of)?, offset))) {
                None => alloc(bytes)?,
                Some((of, offset)) => stretch(of, offset, bytes),
            };
            scratch.push(buffer);
        }
        let workspace =
            |wanted: bool| (wanted && program.workspace > 0).then(|| alloc(program.workspace)).transpose();
        let workspaces = [workspace(true)?, workspace(program.takes_turns && device.has_streams())?];
        Ok(Self { program, scratch, workspaces })
    }

    /// Keys that arrive while the kernels run, and the buffers that other ranks write; or the reason why
    /// there are none.
    pub(super) fn coming(&self) -> Result<(Coming, Vec<&DevBuffer>), String> {
        let coming = self.program.coming.clone().ok_or("its program waits for no keys")?;
        let buffer = |buf| match buf {
            Buf::Scratch(number) => self.scratch.get(number).ok_or("no buffer for keys to come to"),
            _ => Err("keys come to a buffer of the call"),
        };
        let buffers = coming.all_buffers().into_iter().map(buffer).collect::<Result<_, _>>()?;
        Ok((coming, buffers))
    }
}

fn alloc(device: &Device, bytes: u64) -> Result<DevBuffer, fmha::Error> {
    device.memory().alloc(bytes)
}

/// Part of a buffer: `bytes` bytes from `offset` on.
fn stretch(of: &DevBuffer, offset: u64, bytes: u64) -> DevBuffer {
    let space: MemorySpace = of.slice().space();
    let place = of.as_ptr().wrapping_add(offset as usize);
    // SAFETY: both are scratch of one program and dropped together; each of its steps names the whole or stretches.
    unsafe { DevBuffer::from_raw(space, place, bytes, Box::new(|_| ())) }
}
