//! Backend of a third party: registered, chosen by name, and launched only with calls that core has checked.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::atomic::{AtomicUsize, Ordering};

use fmha::{
    Accuracy, Attention, AttentionOutput, Backend, Call, DType, DevBuffer, DevSlice, DevSliceMut, Device,
    DeviceMemory, Dims, Error, FmhaBackend, FwdArgs, Launch, MemorySpace, PlanOptions, PlanParts, Planned,
    Promises, Refusal, ScoreSums, ValidBwd, ValidCombine, ValidFwd, Workspace,
};

type Result<T> = std::result::Result<T, Error>;

/// Backend for attention over equal values, whose mean is any of them. It supports only f32.
struct Alike {
    name: String,
}

/// Number of launches in this process.
static LAUNCHES: AtomicUsize = AtomicUsize::new(0);

impl Alike {
    fn refused<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(Error::Unsupported { backend: self.name.clone(), refusals: vec![Refusal::new("alike", reason)] })
    }
}

// SAFETY: the kernel below reads V's first element and writes O's and LSE's, all of which the check saw to be there;
// its memory is the host's.
unsafe impl FmhaBackend for Alike {
    fn kind(&self) -> &'static str {
        "alike"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn kernels(&self) -> Vec<&'static str> {
        vec!["alike"]
    }

    fn memory(&self) -> &dyn DeviceMemory {
        &Host
    }

    fn plan_fwd(&self, problem: &ValidFwd, _: &PlanOptions) -> Result<Planned<ValidFwd>> {
        if problem.dtypes.v != DType::F32 || problem.dtypes.o != DType::F32 {
            return self.refused(format!("dtype_v {} is not f32", problem.dtypes.v));
        }
        let parts = PlanParts {
            kernel: "alike".to_owned(),
            details: Vec::new(),
            steps: Vec::new(),
            refusals: Vec::new(),
            is_fallback: false,
            workspace: Workspace::zeroed(8),
            promises: Promises {
                deterministic: true,
                batch_invariant: true,
                row_invariant: true,
                graph_capturable: false,
                accuracy: Accuracy::Exact,
                score_sums: ScoreSums::F32,
            },
        };
        Ok(Planned { parts, launch: Box::new(Kernel) })
    }

    fn plan_bwd(&self, _: &ValidBwd, _: &PlanOptions) -> Result<Planned<ValidBwd>> {
        self.refused("it computes 0 gradients")
    }

    fn plan_combine(&self, _: &ValidCombine, _: &PlanOptions) -> Result<Planned<ValidCombine>> {
        self.refused("it merges 0 parts")
    }
}

struct Kernel;

impl Launch<ValidFwd> for Kernel {
    unsafe fn launch(&self, call: &Call<'_, ValidFwd>) -> Result<()> {
        LAUNCHES.fetch_add(1, Ordering::Relaxed);
        let args = call.args;
        let workspace = args.workspace.as_ref().map_or(std::ptr::null_mut(), DevSliceMut::as_mut_ptr);
        // SAFETY: the check saw eight bytes, aligned to 256.
        assert_eq!(unsafe { workspace.cast::<u64>().read() }, 0, "core clears it");
        // SAFETY: contiguous tensors of the extents that the check saw; f32 as planned.
        unsafe {
            let value = args.v_slice().as_ptr().cast::<f32>().read_unaligned();
            let o = args.o.as_mut_ptr().cast::<f32>();
            for i in 0..call.problem.shape_o().num_elems() as usize {
                o.add(i).write_unaligned(value);
            }
        }
        Ok(())
    }
}

struct Host;

impl DeviceMemory for Host {
    fn space(&self) -> MemorySpace {
        MemorySpace::Host
    }

    fn alloc(&self, bytes: u64) -> Result<DevBuffer> {
        let layout = Layout::from_size_align(bytes.max(1) as usize, 256).unwrap();
        // SAFETY: the layout has a byte at least.
        let address = unsafe { alloc_zeroed(layout) };
        // The memory holds garbage, so a run must clear it where it needs zeros. SAFETY: allocated above, of this size.
        unsafe { address.write_bytes(0xA5, bytes as usize) };
        // SAFETY: the layout has a byte at least.
        let free = Box::new(move |address| unsafe { dealloc(address, layout) });
        // SAFETY: only this code uses the memory until `free`.
        Ok(unsafe { DevBuffer::from_raw(MemorySpace::Host, address, bytes, free) })
    }

    fn upload_bytes(&self, _: &[u8], _: &mut DevBuffer) -> Result<()> {
        Err(Error::NoDevice("host memory needs 0 copies".to_owned()))
    }

    fn download_bytes(&self, _: &DevBuffer, _: &mut [u8]) -> Result<()> {
        Err(Error::NoDevice("host memory needs 0 copies".to_owned()))
    }
}

const DIMS: Dims = Dims::batch(1).seqlens(2, 3).heads(1, 1).head_dim(4);

/// There is only one test, since registration affects the whole process.
#[test]
fn a_backend_of_a_third_party_is_registered_chosen_by_name_and_given_checked_calls_alone() {
    let unknown = "alike:1".parse::<Backend>().unwrap_err().text;
    assert!(unknown.starts_with("backend `alike:1` is none of auto, cpu, cuda"), "{unknown}");
    fmha::register("alike", |ordinal| match ordinal {
        0 | 1 => Ok(Device::new(Alike { name: format!("alike:{ordinal}") })),
        _ => Err(Error::NoDevice(format!("there is no device {ordinal}: alike has 2"))),
    })
    .unwrap();
    let unknown = "like".parse::<Backend>().unwrap_err().text;
    assert!(unknown.ends_with("rocm:N, alike, alike:N"), "{unknown}");
    for taken in ["alike", "cpu", "auto", "", "a:b"] {
        let again = fmha::register(taken, |_| Err(Error::NoDevice(String::new())));
        assert!(again.unwrap_err().to_string().contains(&format!("name `{taken}`")));
    }

    let backend: Backend = "alike:1".parse().unwrap();
    assert_eq!(backend.to_string(), "alike:1");
    let device = backend.clone().open().unwrap();
    assert_eq!((device.kind(), device.name()), ("alike", "alike:1"));
    assert!(device.is(&"alike:1".parse::<Backend>().unwrap().open().unwrap()), "it is opened once");
    assert!(!device.is(&"alike".parse::<Backend>().unwrap().open().unwrap()));
    assert!("alike:2".parse::<Backend>().unwrap().open().unwrap_err().to_string().contains("alike has 2"));
    let listed = fmha::devices().into_iter().filter(|found| found.backend.to_string().starts_with("alike"));
    assert_eq!(listed.filter(|found| found.device.is_ok()).count(), 2);

    let (q, v) = ([1f32; 8], [2.5f32; 12]);
    let options = Attention::new(DIMS).backend(backend);
    let AttentionOutput { o, .. } = fmha::attention(&q, &[0f32; 12], &v, &options).unwrap();
    assert_eq!((o, LAUNCHES.load(Ordering::Relaxed)), (vec![2.5; 8], 1));
    let half = fmha::attention(&[half::f16::ONE; 8], &[half::f16::ONE; 12], &[half::f16::ONE; 12], &options);
    assert!(half.unwrap_err().to_string().contains("alike: dtype_v f16 is not f32"));

    let plan = device.plan_fwd(&options.problem(DType::F32).validate().unwrap(), &PlanOptions::default());
    let (plan, mut short) = (plan.unwrap(), [0f32; 7]);
    let (q, k, v) = (DevSlice::host(&q), DevSlice::host(&v), DevSlice::host(&v));
    let mut args = FwdArgs::new(q, k, v, DevSliceMut::host(&mut short));
    let error = plan.run(&mut args, &device.default_stream()).unwrap_err().to_string();
    assert!(error.starts_with("o has 28 bytes"), "{error}");
    assert_eq!(LAUNCHES.load(Ordering::Relaxed), 1, "what does not fit is not launched");
}
