//! `wgmma` fed by TMA, every swizzle and both majors, against an integer product; and `mma.sync`.

#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

mod common;

use common::{HEADER, Random, block, checked, download, run, upload, upload_bytes};
use fmha_emu_ptx::{Device, FaultKind, Options, TensorMap};

/// One product: D[64][n] = A[64][k] * B[k][n], k as wide as the swizzle span (or a span of N, when transposed).
#[derive(Clone, Copy, Debug)]
struct Product {
    kind: &'static str,
    bytes: u32,
    n: u32,
    swizzle: u8,
    /// B as [k][n] in memory, read MN-major.
    transposed: bool,
    f16_out: bool,
    a_regs: bool,
}

impl Product {
    fn span(self) -> u32 {
        [16, 32, 64, 128][usize::from(self.swizzle)]
    }

    fn depth(self) -> u32 {
        self.span() / self.bytes
    }

    fn accumulators(self) -> u32 {
        if self.f16_out { self.n / 4 } else { self.n / 2 }
    }
}

fn encode(kind: &str, v: i32) -> u32 {
    let x = v as f32;
    match kind {
        "f16" => u32::from(half::f16::from_f32(x).to_bits()),
        "bf16" => u32::from(half::bf16::from_f32(x).to_bits()),
        "tf32" => x.to_bits(),
        "s8" => v as u32 & 0xff,
        // Small integers are exact in both: take the upper byte of the half for E5M2.
        "e5m2" => u32::from(half::f16::from_f32(x).to_bits() >> 8),
        _ => {
            let a = v.unsigned_abs();
            if a == 0 {
                return 0;
            }
            let e = 31 - a.leading_zeros();
            u32::from(v < 0) << 7 | (e + 7) << 3 | ((a << 3) >> e & 7)
        }
    }
}

fn matrix(kind: &str, bytes: u32, values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| encode(kind, *v).to_le_bytes()[..bytes as usize].to_vec()).collect()
}

fn map(
    address: u64,
    bytes: u32,
    rows: u32,
    columns: u32,
    box_rows: u32,
    swizzle: u8,
    kind: &str,
) -> TensorMap {
    let span = [16, 32, 64, 128][usize::from(swizzle)];
    TensorMap {
        data_type: match (kind, bytes) {
            ("f16", _) => 6,
            ("bf16", _) => 9,
            ("tf32", _) => 7,
            _ => 0,
        },
        rank: 2,
        address,
        dims: [columns.into(), rows.into(), 1, 1, 1],
        strides: [u64::from(columns * bytes), 0, 0, 0],
        box_dims: [span / bytes, box_rows, 1, 1, 1],
        element_strides: [1; 5],
        interleave: 0,
        swizzle,
        nan_fill: false,
    }
}

/// The kernel: one thread loads both operands by TMA, four warps multiply, each thread stores its registers.
fn kernel(p: Product, descriptor_swizzle: u64, wait_for_load: bool) -> String {
    let (n, span, k) = (p.n, p.span(), p.depth());
    let step = 32 / p.bytes;
    let count = p.accumulators();
    let regs: Vec<String> = (0..count).map(|i| format!("%acc{i}")).collect();
    let regs = regs.join(",");
    let b_bytes = n * k * p.bytes;
    let code = [0u64, 3, 2, 1][descriptor_swizzle as usize] << 62;
    // K-major: groups of eight rows. MN-major: chunks of the span along N, groups of eight k.
    let stride = u64::from((8 * span) >> 4) << 32;
    let leading = if p.transposed { u64::from((k * span) >> 4) << 16 } else { 1 << 16 };
    let (a_bits, b_bits) = (code | stride | 1 << 16, code | stride | leading);
    let b_step = if p.transposed { step * span } else { 32 };
    let chunks = if p.transposed { n * p.bytes / span } else { 1 };
    let mut loads = String::new();
    for c in 0..chunks {
        let column = c * span / p.bytes;
        loads.push_str(&format!(
            "@%p cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%b+{}], [mb, {{{column}, 0}}], [%bar];\n",
            c * k * span
        ));
    }
    let out = if p.kind == "s8" {
        "s32"
    } else if p.f16_out {
        "f16"
    } else {
        "f32"
    };
    let mut products = String::new();
    for i in 0..k / step {
        let trans = if p.bytes != 2 {
            String::new()
        } else if p.a_regs {
            format!(", {}", u32::from(p.transposed))
        } else {
            format!(", 0, {}", u32::from(p.transposed))
        };
        let scale = if p.kind == "s8" { "" } else { ", 1, 1" };
        let a = if p.a_regs {
            format!("{{%ar{0},%ar{1},%ar{2},%ar{3}}}", 4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3)
        } else {
            "%da".into()
        };
        products.push_str(&format!(
            "wgmma.mma_async.sync.aligned.m64n{n}k{step}.{out}.{0}.{0} {{{regs}}}, {a}, %db, {1}{scale}{trans};
             add.s64 %da, %da, 2; add.s64 %db, %db, {2};\n",
            p.kind,
            u32::from(i > 0),
            b_step >> 4
        ));
    }
    let mut fragments = String::new();
    if p.a_regs {
        // Each thread loads its A registers from a buffer laid out register by register.
        for r in 0..4 * (k / step) {
            fragments.push_str(&format!("ld.global.b32 %ar{r}, [%afrag+{}];\n", r * 512));
        }
    }
    let stores: String =
        (0..count).map(|i| format!("st.global.b32 [%out+{}], %acc{i};\n", i * 512)).collect();
    let wait = if wait_for_load {
        "W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%bar], 0; @!%q bra W;"
    } else {
        ""
    };
    format!(
        "{HEADER}.extern .shared .align 1024 .b8 raw[];
        .visible .entry k(.param .align 64 .b8 ma[128], .param .align 64 .b8 mb[128], .param .u64 o, .param .u64 fr) {{
        .reg .pred %p, %q; .reg .b32 %t, %a, %b, %bar, %acc<{count}>, %ar<64>; .reg .b64 %da, %db, %out, %off, %x, %afrag;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0;
        mov.u32 %a, raw; add.u32 %b, %a, 16384; add.u32 %bar, %b, 65536;
        @%p mbarrier.init.shared::cta.b64 [%bar], 1;
        @%p fence.mbarrier_init.release.cluster;
        bar.sync 0;
        @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {};
        @%p cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%a], [ma, {{0, 0}}], [%bar];
        {loads}
        mul.wide.u32 %off, %t, 4; ld.param.u64 %afrag, [fr]; add.s64 %afrag, %afrag, %off;
        {fragments}
        {wait}
        shr.u32 %a, %a, 4; cvt.u64.u32 %da, %a; or.b64 %da, %da, {a_bits};
        shr.u32 %b, %b, 4; cvt.u64.u32 %db, %b; or.b64 %db, %db, {b_bits};
        wgmma.fence.sync.aligned;
        {products}
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        ld.param.u64 %out, [o]; add.s64 %out, %out, %off;
        {stores} ret; }}",
        64 * k * p.bytes + b_bytes,
    )
}

fn multiply(
    p: Product,
    descriptor_swizzle: u64,
    wait: bool,
    options: &Options,
) -> Result<(), fmha_emu_ptx::Fault> {
    let device = Device::new();
    let (n, k) = (p.n as usize, p.depth() as usize);
    let mut random = Random(u64::from(p.n) + u64::from(p.swizzle));
    let a: Vec<i32> = (0..64 * k).map(|_| random.small(3)).collect();
    let b: Vec<i32> = (0..n * k).map(|_| random.small(3)).collect();
    let (bk, bn) = if p.transposed { (n, 1) } else { (1, k) };
    let (rows, columns) = if p.transposed { (k, n) } else { (n, k) };
    let mut stored = vec![0; n * k];
    for i in 0..n {
        for j in 0..k {
            stored[i * bn + j * bk] = b[i * k + j];
        }
    }
    let pa = upload_bytes(&device, &matrix(p.kind, p.bytes, &a));
    let pb = upload_bytes(&device, &matrix(p.kind, p.bytes, &stored));
    let ma = map(pa, p.bytes, 64, k as u32, 64, p.swizzle, p.kind);
    let box_rows = rows as u32;
    let mb = map(pb, p.bytes, rows as u32, columns as u32, box_rows, p.swizzle, p.kind);
    for m in [&ma, &mb] {
        m.validate().unwrap();
    }
    // A as registers: register r of a 32-byte step holds row lane/4 (+8 for odd r), bytes 4*(lane%4) (+16 from r = 2).
    let per = 4 / p.bytes as usize;
    let steps = k * p.bytes as usize / 32;
    let mut fragment = vec![0u32; 4 * steps * 128];
    for (i, word) in fragment.iter_mut().enumerate() {
        let (r, thread) = (i / 128, i % 128);
        let row = thread / 32 * 16 + thread % 32 / 4 + 8 * (r % 2);
        let column = (r / 4 * 32 + r % 4 / 2 * 16 + thread % 4 * 4) / p.bytes as usize;
        for e in 0..per {
            *word |= encode(p.kind, a[row * k + column + e]) << (8 * p.bytes as usize * e);
        }
    }
    let pf = upload(&device, &fragment);
    let count = p.accumulators() as usize;
    let out = device.alloc(count as u64 * 512);
    let mut args = Vec::new();
    args.extend(ma.encode());
    args.extend(mb.encode());
    args.extend(out.to_le_bytes());
    args.extend(pf.to_le_bytes());
    run(&device, &kernel(p, descriptor_swizzle, wait), &block(128, 16384 + 65536 + 64), &args, options)?;
    let got = download(&device, out, count * 128);
    for (i, &bits) in got.iter().enumerate() {
        let (r, thread) = (i / 128, i % 128);
        let cells: Vec<(usize, usize, f32)> = if p.f16_out {
            let row = thread / 32 * 16 + thread % 32 / 4 + 8 * (r % 2);
            let column = r / 2 * 8 + thread % 4 * 2;
            let h = |v: u32| half::f16::from_bits(v as u16).to_f32();
            vec![(row, column, h(bits)), (row, column + 1, h(bits >> 16))]
        } else {
            let row = thread / 32 * 16 + thread % 32 / 4 + 8 * (r / 2 % 2);
            let column = r / 4 * 8 + thread % 4 * 2 + r % 2;
            let v = if p.kind == "s8" { bits as i32 as f32 } else { f32::from_bits(bits) };
            vec![(row, column, v)]
        };
        for (row, column, v) in cells {
            let want: i32 = (0..k).map(|j| a[row * k + j] * b[column * k + j]).sum();
            assert_eq!(v, want as f32, "{p:?} at ({row}, {column})");
        }
    }
    Ok(())
}

const BF16: Product =
    Product { kind: "bf16", bytes: 2, n: 64, swizzle: 3, transposed: false, f16_out: false, a_regs: false };

#[test]
fn every_swizzle_and_major_gives_the_integer_product() {
    for swizzle in 1..=3 {
        for n in [8, 64, 128, 256] {
            multiply(Product { n, swizzle, ..BF16 }, swizzle.into(), true, &checked())
                .unwrap_or_else(|f| panic!("{f}"));
        }
        for n in [64, 128, 192] {
            let p = Product { n, swizzle, transposed: true, ..BF16 };
            multiply(p, swizzle.into(), true, &checked()).unwrap_or_else(|f| panic!("{p:?} {f}"));
        }
    }
}

#[test]
fn every_element_type_gives_the_integer_product() {
    for (kind, bytes) in [("f16", 2), ("bf16", 2), ("tf32", 4), ("e4m3", 1), ("e5m2", 1), ("s8", 1)] {
        for a_regs in [false, true] {
            let p = Product { kind, bytes, a_regs, ..BF16 };
            multiply(p, 3, true, &checked()).unwrap_or_else(|f| panic!("{p:?} {f}"));
        }
    }
    for kind in ["f16", "e4m3"] {
        let p = Product { kind, bytes: if kind == "f16" { 2 } else { 1 }, f16_out: true, ..BF16 };
        multiply(p, 3, true, &checked()).unwrap_or_else(|f| panic!("{p:?} {f}"));
    }
}

#[test]
fn late_completion_of_a_sound_kernel_changes_nothing() {
    for seed in 1..50 {
        let mut options = Options::default();
        options.asynchrony = fmha_emu_ptx::Asynchrony::Late { seed };
        multiply(BF16, 3, true, &options).unwrap_or_else(|f| panic!("seed {seed}: {f}"));
    }
}

#[test]
fn a_descriptor_with_another_swizzle_is_named() {
    let fault = multiply(BF16, 2, true, &Options::default()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Swizzle, "{fault}");
}

#[test]
fn a_missing_wait_for_the_load_is_a_race() {
    // The check of initialised bytes may see it first; it must not be needed.
    let mut options = checked();
    options.check_uninitialised = false;
    let fault = multiply(BF16, 3, false, &options).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Race, "{fault}");
}

#[test]
fn mma_sync_gives_the_integer_product() {
    for (kind, bytes) in [("bf16", 2), ("e4m3", 1), ("e5m2", 1)] {
        integer_product(kind, bytes);
    }
}

/// One instruction: 32 bytes of either operand's inner dimension, each register four of them.
fn integer_product(kind: &str, bytes: usize) {
    let (k, device) = (32 / bytes, Device::new());
    let per_register = 4 / bytes;
    let mut random = Random(11);
    let a: Vec<i32> = (0..16 * k).map(|_| random.small(3)).collect();
    let b: Vec<i32> = (0..8 * k).map(|_| random.small(3)).collect();
    let register = |of: &[i32], at: usize| {
        (0..per_register).fold(0, |word, e| word | encode(kind, of[at + e]) << (8 * bytes * e))
    };
    let mut words = Vec::new();
    for r in 0..4 {
        words.extend((0..32).map(|l| {
            let row = l / 4 + 8 * (r % 2);
            register(&a, row * k + per_register * (l % 4 + 4 * (r / 2)))
        }));
    }
    for r in 0..2 {
        words.extend((0..32).map(|l| register(&b, l / 4 * k + per_register * (l % 4 + 4 * r))));
    }
    let (input, out) = (upload(&device, &words), device.alloc(512));
    let loads: String = (0..6).map(|i| format!("ld.global.b32 %r{i}, [%i+{}];", i * 128)).collect();
    let stores: String = (0..4).map(|i| format!("st.global.f32 [%o+{}], %f{i};", i * 128)).collect();
    let ptx = format!(
        "{HEADER}.visible .entry k(.param .u64 i, .param .u64 o) {{
        .reg .b32 %r<8>, %t; .reg .f32 %f<4>; .reg .b64 %i, %o, %l;
        ld.param.u64 %i, [i]; ld.param.u64 %o, [o]; mov.u32 %t, %tid.x; mul.wide.u32 %l, %t, 4;
        add.s64 %i, %i, %l; add.s64 %o, %o, %l; {loads}
        mov.f32 %f0, 0f3F800000;
        mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{%f0,%f1,%f2,%f3}}, {{%r0,%r1,%r2,%r3}}, {{%r4,%r5}}, {{%f0,%f0,%f0,%f0}};
        {stores} ret; }}"
    );
    let args: Vec<u8> = [input, out].iter().flat_map(|v| v.to_le_bytes()).collect();
    run(&device, &ptx, &block(32, 0), &args, &Options::default()).unwrap_or_else(|f| panic!("{f}"));
    for (i, bits) in download(&device, out, 128).into_iter().enumerate() {
        let (r, l) = (i / 32, i % 32);
        let (row, column) = (l / 4 + 8 * (r / 2), 2 * (l % 4) + r % 2);
        let want: i32 = (0..k).map(|j| a[row * k + j] * b[column * k + j]).sum();
        assert_eq!(f32::from_bits(bits), want as f32 + 1.0, "{kind} ({row}, {column})");
    }
}

#[test]
fn ldmatrix_and_stmatrix_move_rows_and_their_transposes() {
    for trans in ["", ".trans"] {
        let device = Device::new();
        let out = device.alloc(4 * 128);
        let ptx = format!(
            "{HEADER}.visible .entry k(.param .u64 o) {{ .shared .align 16 .b8 s[512];
            .reg .b32 %r<12>; .reg .b64 %o, %l;
            ld.param.u64 %o, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %l, %r0, 4; add.s64 %o, %o, %l;
            mov.u32 %r1, s; mad.lo.u32 %r2, %r0, 16, %r1;
            shl.b32 %r3, %r0, 8; or.b32 %r4, %r3, 1; shl.b32 %r4, %r4, 16; or.b32 %r4, %r4, %r3;
            add.u32 %r5, %r4, 0x20002; add.u32 %r6, %r5, 0x20002; add.u32 %r7, %r6, 0x20002;
            st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}}; bar.sync 0;
            ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r8,%r9,%r10,%r11}}, [%r2];
            st.global.b32 [%o], %r8; st.global.b32 [%o+128], %r9; st.global.b32 [%o+256], %r10; st.global.b32 [%o+384], %r11;
            stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2], {{%r8,%r9,%r10,%r11}}; bar.sync 0;
            ld.shared.b32 %r9, [%r2+4]; setp.ne.b32 %p, %r9, %r5; @%p trap; ret; }}"
        )
        .replace(".reg .b64 %o", ".reg .pred %p; .reg .b64 %o");
        run(&device, &ptx, &block(32, 0), &out.to_le_bytes(), &checked()).unwrap_or_else(|f| panic!("{f}"));
        for (i, bits) in download(&device, out, 128).into_iter().enumerate() {
            let (m, l) = (i / 32, i % 32);
            for e in 0..2 {
                let (x, y) = (l / 4, 2 * (l % 4) + e);
                let (row, column) = if trans.is_empty() { (x, y) } else { (y, x) };
                let want = ((m * 8 + row) << 8 | column) as u32;
                assert_eq!(bits >> (16 * e) & 0xffff, want, "matrix {m} lane {l} {trans}");
            }
        }
    }
}

#[test]
fn an_operand_that_has_changed_is_read_anew() {
    // Ones without a swizzle: A at 0, its two halves along k 1024 bytes apart; B at 2048, 128 bytes apart.
    let step = |change: &str, at: u32| {
        format!(
            "{change} fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;
             wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f0,%f1,%f2,%f3}}, %da, %db, 0, 1, 1, 0, 0;
             wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; bar.sync 0;
             st.global.v4.f32 [%o+{at}], {{%f0,%f1,%f2,%f3}};"
        )
    };
    let set = |at: u32, pair: u32| format!("@%p st.shared.b32 [%s+{at}], {pair};");
    let ptx = format!(
        "{HEADER}.visible .entry k(.param .u64 d) {{ .shared .align 1024 .b8 mem[2304];
        .reg .pred %p, %q; .reg .b32 %t, %s, %w, %one; .reg .f32 %f<4>; .reg .b64 %o, %x, %da, %db;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; setp.lt.u32 %q, %t, 16; mov.u32 %s, mem; ld.param.u64 %o, [d];
        mul.wide.u32 %x, %t, 16; add.s64 %o, %o, %x; mov.b32 %one, 0x3f803f80;
        shl.b32 %w, %t, 4; add.u32 %w, %w, %s; st.shared.v4.b32 [%w], {{%one,%one,%one,%one}};
        @%q st.shared.v4.b32 [%w+2048], {{%one,%one,%one,%one}};
        shr.u32 %w, %s, 4; cvt.u64.u32 %da, %w; add.s64 %db, %da, 128;
        or.b64 %da, %da, {}; or.b64 %db, %db, {}; {} {} {} ret; }}",
        8u64 << 32 | 64 << 16,
        8u64 << 32 | 8 << 16,
        step("", 0),
        step(&set(2048, 0x4000_4000), 2048),
        step(&set(0, 0x4040_4040), 4096),
    );
    for options in [Options::default(), checked()] {
        let device = Device::new();
        let out = device.alloc(3 * 2048);
        run(&device, &ptx, &block(128, 0), &out.to_le_bytes(), &options).unwrap_or_else(|f| panic!("{f}"));
        let d = download(&device, out, 3 * 512);
        for (i, bits) in d.into_iter().enumerate() {
            let (pass, t, r) = (i / 512, i % 512 / 4, i % 4);
            let (row, column) = (t / 32 * 16 + t % 32 / 4 + r / 2 * 8, t % 4 * 2 + r % 2);
            let a = if pass > 1 && row == 0 { 3.0 } else { 1.0 };
            let b = if pass > 0 && column == 0 { 2.0 } else { 1.0 };
            assert_eq!(f32::from_bits(bits), 14.0 + 2.0 * a * b, "product {pass}, ({row}, {column})");
        }
    }
}
