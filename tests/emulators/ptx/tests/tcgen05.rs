//! `tcgen05`: a product in tensor memory from operands that TMA loaded, against an integer product.

mod common;

use common::{Random, block, checked, download, run, upload_bytes};
use fmha_emu_ptx::{Device, Fault, FaultKind, Options, TensorMap};

/// How a kernel is broken, if at all.
#[derive(Clone, Copy, PartialEq)]
enum Flaw {
    None,
    /// Reads D before the product has been announced.
    NoWait,
    /// Warp w reads the lanes of warp w + 1.
    WrongWarp,
    Leak,
    FreedTwice,
}

fn map(address: u64, rows: u32) -> TensorMap {
    TensorMap {
        data_type: 9,
        rank: 2,
        address,
        dims: [64, rows.into(), 1, 1, 1],
        strides: [128, 0, 0, 0],
        box_dims: [64, rows, 1, 1, 1],
        element_strides: [1; 5],
        interleave: 0,
        swizzle: 3,
        nan_fill: false,
    }
}

/// D[m][n] = A[m][64] * B[n][64]ᵀ in bf16; each warp then stores the 32 lanes it reaches, column after column.
fn kernel(m: u32, n: u32, flaw: Flaw) -> String {
    let idesc = 1u32 << 4 | 1 << 7 | 1 << 10 | (n / 8) << 17 | (m / 16) << 24;
    let desc = 2u64 << 61 | 1 << 46 | (1024u64 >> 4) << 32 | 1 << 16;
    let mut products = String::new();
    for i in 0..4 {
        products.push_str(&format!(
            "setp.ne.u32 %q, {i}, 0; @%p tcgen05.mma.cta_group::1.kind::f16 [%tm], %da, %db, {idesc}, %q;
             add.s64 %da, %da, 2; add.s64 %db, %db, 2;\n"
        ));
    }
    let wait = |bar: &str, label: &str| {
        format!("{label}: mbarrier.try_wait.parity.shared::cta.b64 %q, [{bar}], 0; @!%q bra {label};")
    };
    let done = if flaw == Flaw::NoWait { String::new() } else { wait("%done", "WD") };
    let shift = if flaw == Flaw::WrongWarp { "add.u32 %r, %r, 1; and.b32 %r, %r, 3;" } else { "" };
    let regs: Vec<String> = (0..32).map(|i| format!("%v{i}")).collect();
    let regs = regs.join(",");
    let mut reads = String::new();
    for c in (0..n).step_by(32) {
        reads.push_str(&format!(
            "tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{regs}}}, [%tl+{c}]; tcgen05.wait::ld.sync.aligned;\n"
        ));
        for i in 0..32 {
            reads.push_str(&format!("st.global.b32 [%out+{}], %v{i};\n", (c + i) * 512));
        }
    }
    let dealloc = "@!%w bra D1; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 256; D1:";
    let dealloc = match flaw {
        Flaw::Leak => String::new(),
        Flaw::FreedTwice => format!("{dealloc} {}", dealloc.replace("D1", "D2")),
        _ => dealloc.to_string(),
    };
    format!(
        ".version 8.6\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 raw[];
        .visible .entry k(.param .align 64 .b8 ma[128], .param .align 64 .b8 mb[128], .param .u64 o) {{
        .reg .pred %p, %q, %w; .reg .b32 %t, %a, %b, %bar, %done, %slot, %tm, %tl, %r, %v<32>; .reg .b64 %da, %db, %out, %off;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; setp.lt.u32 %w, %t, 32;
        mov.u32 %a, raw; add.u32 %b, %a, 16384; add.u32 %bar, %b, 32768; add.u32 %done, %bar, 8; add.u32 %slot, %bar, 16;
        @%p mbarrier.init.shared::cta.b64 [%bar], 1; @%p mbarrier.init.shared::cta.b64 [%done], 1;
        @%p fence.mbarrier_init.release.cluster;
        @!%w bra A1; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 256;
        tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; A1:
        tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
        ld.shared.b32 %tm, [%slot];
        @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {};
        @%p cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%a], [ma, {{0, 0}}], [%bar];
        @%p cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%b], [mb, {{0, 0}}], [%bar];
        {}
        shr.u32 %a, %a, 4; cvt.u64.u32 %da, %a; or.b64 %da, %da, {desc};
        shr.u32 %b, %b, 4; cvt.u64.u32 %db, %b; or.b64 %db, %db, {desc};
        {products}
        @%p tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%done];
        {done}
        tcgen05.fence::after_thread_sync;
        shr.u32 %r, %t, 5; {shift} shl.b32 %r, %r, 21; add.u32 %tl, %tm, %r;
        mul.wide.u32 %off, %t, 4; ld.param.u64 %out, [o]; add.s64 %out, %out, %off;
        {reads}
        tcgen05.fence::before_thread_sync; bar.sync 0; {dealloc} ret; }}",
        (m + n) * 128,
        wait("%bar", "WB"),
    )
}

fn product(m: u32, n: u32, flaw: Flaw, options: &Options) -> Result<(), Fault> {
    let device = Device::new();
    let mut random = Random(u64::from(m + n));
    let mut values = |rows: u32| -> Vec<i32> { (0..rows * 64).map(|_| random.small(3)).collect() };
    let (a, b) = (values(m), values(n));
    let bytes = |v: &[i32]| -> Vec<u8> {
        v.iter().flat_map(|x| half::bf16::from_f32(*x as f32).to_bits().to_le_bytes()).collect()
    };
    let out = device.alloc(u64::from(n) * 512);
    let mut args = Vec::new();
    args.extend(map(upload_bytes(&device, &bytes(&a)), m).encode());
    args.extend(map(upload_bytes(&device, &bytes(&b)), n).encode());
    args.extend(out.to_le_bytes());
    run(&device, &kernel(m, n, flaw), &block(128, 65536), &args, options)?;
    let got = download(&device, out, n as usize * 128);
    for column in 0..n as usize {
        for row in 0..m as usize {
            // M 128: one lane a row. M 64: sixteen rows in each quarter of the lanes.
            let lane = if m == 128 { row } else { row % 16 + 32 * (row / 16) };
            let want: i32 = (0..64).map(|k| a[row * 64 + k] * b[column * 64 + k]).sum();
            assert_eq!(
                f32::from_bits(got[column * 128 + lane]),
                want as f32,
                "M {m} N {n} ({row}, {column})"
            );
        }
    }
    Ok(())
}

#[test]
fn a_product_in_tensor_memory_is_the_integer_product() {
    for n in [32, 128, 256] {
        product(128, n, Flaw::None, &checked()).unwrap_or_else(|f| panic!("N {n}: {f}"));
    }
}

#[test]
fn each_misuse_of_tensor_memory_has_its_name() {
    let found = |flaw| product(128, 64, flaw, &checked()).unwrap_err();
    assert_eq!(found(Flaw::WrongWarp).kind, FaultKind::TensorMemory);
    assert!(found(Flaw::WrongWarp).text.contains("reaches lanes"));
    assert_eq!(found(Flaw::Leak).kind, FaultKind::TensorMemory);
    assert_eq!(found(Flaw::FreedTwice).kind, FaultKind::TensorMemory);
    let race = found(Flaw::NoWait);
    assert!(race.kind == FaultKind::Race || race.text.contains("nothing has written"), "{race}");
}
