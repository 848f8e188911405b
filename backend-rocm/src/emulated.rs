//! The forward kernel, compiled as a user would get it, on the emulator, against the f64 reference.
//! Verified in emulation, never on hardware.

use fmha_core::bind;
use fmha_core::reference::{Precision, forward};
use fmha_core::{
    Bias, BiasBroadcast, DType, Descale, DevSlice, DevSliceMut, Dims, DropoutSeed, ElementwiseBias,
    FmhaBackend, FwdArgs, FwdProblem, MemorySpace, PlanOptions, ScoreArgs, SeqArgs, Strides, VLayout,
    ValidFwd,
};
use fmha_emu_cdna as emu;

use crate::kernels::cdna;
use crate::{FwdHandle, RocmBackend};

/// A problem with its inputs in host memory.
struct Case {
    problem: ValidFwd,
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
    cu_q: Option<Vec<i32>>,
    cu_k: Option<Vec<i32>>,
    used_k: Option<Vec<i32>>,
    bias: Option<Vec<u8>>,
    slopes: Option<Vec<f32>>,
    sink: Option<Vec<f32>>,
    descale: Vec<f32>,
    seed: DropoutSeed,
}

/// A small generator of numbers in -1..1: SplitMix64 (Steele et al., 2014).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    fn bytes(&mut self, dtype: DType, elems: u64, scale: f64) -> Vec<u8> {
        let size = dtype.size_bytes() as usize;
        let mut bytes = vec![0; elems as usize * size];
        for elem in bytes.chunks_exact_mut(size) {
            dtype.write(self.next() * scale, elem);
        }
        bytes
    }
}

impl Case {
    fn new(problem: FwdProblem) -> Self {
        let problem = problem.validate().unwrap();
        let mut numbers = Numbers(42);
        let extent = |strides: Strides, shape| strides.extent(shape).unwrap();
        let scale = if problem.dtype_qk.is_fp8() { 1.0 } else { 2.0 };
        let (dtype_qk, dtype_v) = (problem.dtype_qk, problem.dtype_v);
        let dims = problem.dims;
        let descales = u64::from(dims.batch) * u64::from(dims.num_heads_kv);
        Self {
            q: numbers.bytes(dtype_qk, extent(problem.q, problem.shape_q()), scale),
            k: numbers.bytes(dtype_qk, extent(problem.k, problem.shape_k()), scale),
            v: numbers.bytes(dtype_v, extent(problem.v, problem.shape_v()), 1.0),
            cu_q: None,
            cu_k: None,
            used_k: None,
            bias: match problem.bias {
                Bias::Elementwise(bias) => {
                    let shape = problem.shape_bias(bias.broadcast);
                    Some(numbers.bytes(bias.dtype, extent(bias.strides, shape), 2.0))
                }
                _ => None,
            },
            slopes: matches!(problem.bias, Bias::Alibi { .. })
                .then(|| (0..dims.num_heads_q).map(|h| 0.5f32.powi(h as i32 + 1)).collect()),
            sink: problem.sink.then(|| (0..dims.num_heads_q).map(|h| h as f32 - 1.0).collect()),
            descale: (0..descales).map(|i| 0.75 + i as f32 * 0.25).collect(),
            seed: DropoutSeed { seed: 0x1234_5678_9abc, offset: 5 },
            problem,
        }
    }

    fn group(mut self, len_q: &[i32], len_k: &[i32]) -> Self {
        let sums = |lengths: &[i32]| {
            let mut at = 0;
            let mut sums = vec![0];
            sums.extend(lengths.iter().map(|n| {
                at += n;
                at
            }));
            sums
        };
        self.cu_q = Some(sums(len_q));
        self.cu_k = Some(sums(len_k));
        self
    }

    /// Arguments over memory that `place` puts somewhere, inputs first, then O, LSE, keep mask.
    fn args<'a>(
        &'a self,
        place: &mut dyn FnMut(&'a [u8]) -> DevSlice<'a>,
        out: &mut dyn FnMut(u64) -> DevSliceMut<'a>,
    ) -> FwdArgs<'a> {
        let problem = &self.problem;
        let o_bytes = ValidFwd::extent_bytes(problem.o, problem.shape_o(), problem.dtype_o);
        let mut bytes = |slice: &'a [u8]| place(slice);
        let (q, k, v) = (bytes(&self.q), bytes(&self.k), bytes(&self.v));
        let score = ScoreArgs {
            bias: self.bias.as_deref().map(&mut bytes),
            alibi_slopes: self.slopes.as_deref().map(|x| bytes(bytemuck::cast_slice(x))),
            sink: self.sink.as_deref().map(|x| bytes(bytemuck::cast_slice(x))),
            descale_q: (problem.descale_q != Descale::None)
                .then(|| bytes(bytemuck::cast_slice(&self.descale))),
            descale_k: (problem.descale_k != Descale::None)
                .then(|| bytes(bytemuck::cast_slice(&self.descale))),
            descale_v: (problem.descale_v != Descale::None)
                .then(|| bytes(bytemuck::cast_slice(&self.descale))),
            dropout: self.seed,
        };
        let seq = SeqArgs {
            cu_seqlens_q: self.cu_q.as_deref().map(|x| bytes(bytemuck::cast_slice(x))),
            cu_seqlens_k: self.cu_k.as_deref().map(|x| bytes(bytemuck::cast_slice(x))),
            seqused_q: None,
            seqused_k: self.used_k.as_deref().map(|x| bytes(bytemuck::cast_slice(x))),
        };
        let mut args = FwdArgs::new(q, k, v, out(o_bytes));
        args.score = score;
        args.seq = seq;
        args.lse = problem.write_lse.then(|| out(problem.lse_elems() * 4));
        args.keep_mask = problem.write_keep_mask.then(|| out(problem.keep_mask_bytes()));
        args
    }
}

/// Worst error of O beyond its allowance (at most 1 passes), and worst error of LSE.
fn check(arch: &str, case: &Case, tile: &[(&str, &str)]) -> Result<(f64, f64), String> {
    let problem = &case.problem;
    let backend = RocmBackend::pretend(arch).map_err(|e| e.to_string())?;
    let tile = tile.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let options = PlanOptions { tile, ..PlanOptions::default() };
    let plan = backend.plan_fwd(problem, &options).map_err(|e| e.to_string())?;
    let FwdHandle::Cdna(handle) = plan.handle.downcast_ref::<FwdHandle>().unwrap() else {
        return Err(plan.kernel.clone());
    };

    let device = emu::Device::new(
        match arch {
            "gfx90a" => emu::Arch::Gfx90a,
            "gfx942" => emu::Arch::Gfx942,
            _ => emu::Arch::Gfx950,
        },
        emu::Options::default(),
    );
    let module = device.load(&handle.kernel.code).map_err(|e| e.to_string())?;
    let mut addresses = Vec::new();
    let args = case.args(
        &mut |bytes| {
            let address = device.memory.alloc_from(bytes);
            // SAFETY: an address of the emulator's, which nothing dereferences here.
            unsafe { DevSlice::from_raw(MemorySpace::Device, address as *const u8, bytes.len() as u64) }
        },
        &mut |bytes| {
            let address = device.memory.alloc(bytes as usize);
            addresses.push((address, bytes as usize));
            // SAFETY: as above.
            unsafe { DevSliceMut::from_raw(MemorySpace::Device, address as *mut u8, bytes) }
        },
    );
    let params = bind::fwd_params(problem, &args);
    // SAFETY: a `repr(C)` struct without padding, as its macro asserts.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const params).cast::<u8>(), size_of_val(&params)) };
    let launch = emu::Launch {
        grid: [cdna::num_workgroups(problem, &handle.tile) as u32, 1, 1],
        block: [cdna::num_threads(&handle.tile) as u32, 1, 1],
        dynamic_lds: 0,
        args: bytes,
    };
    device.launch(&module, fmha_core::source::ENTRY, &launch).map_err(|e| e.to_string())?;
    let read = |index: usize| {
        let (address, bytes) = addresses[index];
        device.memory.read_vec(address, bytes).unwrap()
    };
    let o = read(0);
    let lse = if problem.write_lse { read(1) } else { Vec::new() };

    let host_args = case.args(&mut |bytes| DevSlice::host(bytes), &mut |_| DevSliceMut::host::<u8>(&mut []));
    let exact = forward(problem, &host_args, Precision::Exact).unwrap();
    let same = forward(problem, &host_args, Precision::AsInput).unwrap();
    let worst_same = exact
        .iter()
        .zip(&same)
        .flat_map(|(exact, same)| exact.o.iter().zip(&same.o))
        .fold(0.0f64, |worst, (exact, same)| worst.max((exact - same).abs()));
    // gfx90a's matrix instructions read subnormal f16 as 0: an error of at most 2^-14 for each V.
    let flushed = if arch == "gfx90a" && problem.dtype_v == DType::F16 { 2f64.powi(-14) } else { 0.0 };
    let allowance = 2.0 * worst_same + 1e-5 + flushed;
    let (mut worst, mut worst_lse) = (0.0f64, 0.0f64);
    let dim_v = problem.dims.head_dim_v as usize;
    for head in &exact {
        for i in 0..head.span.seqlen_q {
            for d in 0..dim_v {
                let at = problem.o.offset(head.span.storage_batch, head.span.q_row + i, head.i_head, d as u32)
                    as usize;
                let ours = problem.dtype_o.read(&o[at * problem.dtype_o.size_bytes() as usize..]);
                let theirs = head.o[i as usize * dim_v + d];
                let error = (ours - theirs).abs() / allowance;
                if error.is_nan() || error > 1.0 {
                    return Err(format!(
                        "O at head {} query {i} dim {d}: {ours}, not {theirs} (allowance {allowance:e})",
                        head.i_head
                    ));
                }
                worst = worst.max(error);
            }
            if problem.write_lse {
                let ours = DType::F32.read(&lse[head.span.lse_index(problem, head.i_head, i) * 4..]);
                let theirs = head.lse[i as usize];
                let error = if ours == theirs { 0.0 } else { (ours - theirs).abs() };
                if error.is_nan() || error > 1e-4 {
                    return Err(format!("LSE at head {} query {i}: {ours}, not {theirs}", head.i_head));
                }
                worst_lse = worst_lse.max(error);
            }
        }
    }
    if problem.write_keep_mask {
        check_keep_mask(case, &read(if problem.write_lse { 2 } else { 1 }))?;
    }
    Ok((worst, worst_lse))
}

fn check_keep_mask(case: &Case, keep: &[u8]) -> Result<(), String> {
    let problem = &case.problem;
    let Dims { batch, seqlen_q, seqlen_k, num_heads_q, .. } = problem.dims;
    let mut at = 0;
    for (b, h) in (0..batch).flat_map(|b| (0..num_heads_q).map(move |h| (b, h))) {
        let mask = fmha_core::dropout::KeepMask::new(problem.p_drop, case.seed, b, h, num_heads_q);
        for (i, j) in (0..seqlen_q).flat_map(|i| (0..seqlen_k).map(move |j| (i, j))) {
            if keep[at] != u8::from(mask.keep(i, j)) {
                return Err(format!("keep mask at batch {b} head {h} query {i} key {j}: {}", keep[at]));
            }
            at += 1;
        }
    }
    Ok(())
}

fn dims(seqlen_q: u32, seqlen_k: u32, head_dim_qk: u32, head_dim_v: u32) -> Dims {
    Dims { batch: 2, seqlen_q, seqlen_k, num_heads_q: 4, num_heads_kv: 2, head_dim_qk, head_dim_v }
}

fn fp8_of(arch: &str) -> Option<(DType, DType)> {
    match arch {
        "gfx90a" => None,
        "gfx942" => Some((DType::E4m3Fnuz, DType::E5m2Fnuz)),
        _ => Some((DType::E4m3Fn, DType::E5m2)),
    }
}

fn cases(arch: &str) -> Vec<(String, Case)> {
    let mut all: Vec<(String, Case)> = Vec::new();
    let mut add = |name: String, case: Case| all.push((name, case));
    let with_lse = |problem: FwdProblem| FwdProblem { write_lse: true, ..problem };
    for dtype in [DType::F16, DType::Bf16] {
        for (qk, v) in
            [(128, 128), (64, 64), (32, 32), (96, 96), (192, 128), (40, 72), (256, 256), (33, 5), (1, 1)]
        {
            let problem = with_lse(FwdProblem::batch(dtype, dims(70, 150, qk, v)));
            add(format!("{dtype}/d{qk}x{v}"), Case::new(problem));
        }
        for mask in ["t", "b", "b:30,5", "t:20,-1", "b:30,0,4", "g:3,9", "b:0,0", "t:-1,-1"] {
            for (q, k) in [(70, 150), (150, 70), (300, 40), (1, 200), (130, 1)] {
                let mut problem = with_lse(FwdProblem::batch(dtype, dims(q, k, 64, 64)));
                problem.mask = mask.parse().unwrap();
                add(format!("{dtype}/mask/{mask}/{q}x{k}"), Case::new(problem));
            }
        }
        for mask in ["0", "b", "t:20,3,2"] {
            let mut problem = with_lse(FwdProblem::group(dtype, dims(90, 130, 64, 64), 95, 190));
            problem.dims.batch = 4;
            problem.mask = mask.parse().unwrap();
            let case = Case::new(problem).group(&[90, 0, 4, 1], &[50, 10, 0, 130]);
            add(format!("{dtype}/group/{mask}"), case);
        }
        let base = || with_lse(FwdProblem::batch(dtype, dims(70, 150, 64, 64)));
        add(format!("{dtype}/no-keys"), Case::new(with_lse(FwdProblem::batch(dtype, dims(40, 0, 64, 64)))));
        let strides = Strides { batch: 4 * 70 * 151, seq: 151, head: 70 * 151, dim: 1 };
        for bias_dtype in [DType::F32, dtype] {
            for broadcast in [BiasBroadcast::BatchHead, BiasBroadcast::OneHead, BiasBroadcast::OneOne] {
                let bias = Bias::Elementwise(ElementwiseBias { dtype: bias_dtype, broadcast, strides });
                add(
                    format!("{dtype}/bias/{bias_dtype}/{broadcast:?}"),
                    Case::new(FwdProblem { bias, ..base() }),
                );
            }
        }
        let alibi = Bias::Alibi { per_batch: false };
        add(
            format!("{dtype}/alibi"),
            Case::new(FwdProblem { bias: alibi, mask: "b".parse().unwrap(), ..base() }),
        );
        add(format!("{dtype}/softcap"), Case::new(FwdProblem { softcap: Some(3.0), ..base() }));
        add(
            format!("{dtype}/sink"),
            Case::new(FwdProblem { sink: true, mask: "t:3,0".parse().unwrap(), ..base() }),
        );
        for scale in [-0.3, 0.0, 4.0, 1e-30] {
            add(
                format!("{dtype}/scale/{scale}"),
                Case::new(FwdProblem { softmax_scale: Some(scale), mask: "t".parse().unwrap(), ..base() }),
            );
        }
        let dropout = FwdProblem { p_drop: 0.3, write_keep_mask: true, mask: "b".parse().unwrap(), ..base() };
        add(format!("{dtype}/dropout"), Case::new(dropout));
        for (q, k) in [(70, 150), (40, 64), (33, 77)] {
            let mut col_major = with_lse(FwdProblem::batch(dtype, dims(q, k, 64, 48)));
            col_major.v_layout = VLayout::ColMajor;
            col_major.v = Strides::bhds(col_major.shape_v());
            add(format!("{dtype}/v-col-major/{k}"), Case::new(col_major));
        }
        let mut odd = base();
        odd.q.seq += 1;
        odd.q.batch += 70;
        odd.o.seq += 3;
        odd.o.batch += 70 * 3;
        odd.v.head = 0;
        odd.v.seq += 5;
        odd.v.batch += 5 * 150;
        add(format!("{dtype}/odd-strides"), Case::new(odd));
        let mut bhsd = base();
        bhsd.q = Strides::bhsd(bhsd.shape_q());
        bhsd.k = Strides::bhsd(bhsd.shape_k());
        bhsd.v = Strides::bhsd(bhsd.shape_v());
        bhsd.o = Strides::bhsd(bhsd.shape_o());
        add(format!("{dtype}/bhsd"), Case::new(bhsd));
        let mut used = Case::new(FwdProblem { seqused_k: true, ..base() });
        used.used_k = Some(vec![0, 101]);
        add(format!("{dtype}/seqused"), used);
        add(format!("{dtype}/f32-output"), Case::new(FwdProblem { dtype_o: DType::F32, ..base() }));
    }
    if let Some((narrow, wide)) = fp8_of(arch) {
        for dtype in [narrow, wide] {
            for (qk, v) in [(128, 128), (64, 64), (72, 40), (256, 256), (30, 30)] {
                let mut problem = with_lse(FwdProblem::batch(dtype, dims(70, 150, qk, v)));
                problem.mask = "b".parse().unwrap();
                problem.descale_q = Descale::PerTensor;
                problem.descale_k = Descale::PerKvHead;
                problem.descale_v = Descale::PerKvHead;
                add(format!("{dtype}/d{qk}x{v}"), Case::new(problem.clone()));
                problem.descale_v = Descale::None;
                problem.dtype_v = DType::Bf16;
                add(format!("{dtype}+bf16/d{qk}x{v}"), Case::new(problem));
            }
            let mut col_major = with_lse(FwdProblem::batch(dtype, dims(70, 150, 64, 64)));
            col_major.v_layout = VLayout::ColMajor;
            col_major.v = Strides::bhds(col_major.shape_v());
            add(format!("{dtype}/v-col-major"), Case::new(col_major));
            let negative = with_lse(FwdProblem::batch(dtype, dims(70, 150, 64, 64)));
            add(
                format!("{dtype}/scale/-0.3"),
                Case::new(FwdProblem { softmax_scale: Some(-0.3), ..negative }),
            );
        }
    }
    all
}

fn all_pass(arch: &str) {
    let filter = std::env::var("CASES").unwrap_or_default();
    let mut failed = Vec::new();
    let mut worst = (0.0f64, 0.0f64);
    let (mut count, cases) = (0, cases(arch));
    for (name, case) in cases.iter().filter(|(name, _)| name.contains(&filter)) {
        count += 1;
        match check(arch, case, &[]) {
            Ok((o, lse)) => worst = (worst.0.max(o), worst.1.max(lse)),
            Err(error) => failed.push(format!("{name}: {error}")),
        }
    }
    println!(
        "{arch}: {count} cases, worst O {:.2} of its allowance, worst LSE error {:.1e}",
        worst.0, worst.1
    );
    assert!(failed.is_empty(), "{} of {count} failed:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn forward_agrees_with_the_reference_on_gfx90a() {
    all_pass("gfx90a");
}

#[test]
fn forward_agrees_with_the_reference_on_gfx942() {
    all_pass("gfx942");
}

#[test]
fn forward_agrees_with_the_reference_on_gfx950() {
    all_pass("gfx950");
}
