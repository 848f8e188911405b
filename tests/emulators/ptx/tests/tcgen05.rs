//! `tcgen05`: a product in tensor memory from operands that TMA loaded, against an integer product.

#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

mod common;

use common::{Random, barrier_and_commit, block, checked, download, run, upload_bytes};
use fmha_emu_ptx::{Device, Fault, FaultKind, Options, RowShift, TensorMap};

/// Fault of a kernel, if any.
#[derive(Clone, Copy, PartialEq)]
enum Flaw {
    None,
    /// Reads D before the product has been announced.
    NoWait,
    /// Warp w reads the lanes of warp w + 1.
    WrongWarp,
    Leak,
    FreedTwice,
    /// Shifts rows behind the commit whose phase it waits for.
    ShiftAfterCommit,
    /// Reads A from tensor memory before the product has been announced.
    ReadsA,
}

fn map(address: u64, rows: u32, box_rows: u32) -> TensorMap {
    TensorMap {
        data_type: 9,
        rank: 2,
        address,
        dims: [64, rows.into(), 1, 1, 1],
        strides: [128, 0, 0, 0],
        box_dims: [64, box_rows, 1, 1, 1],
        element_strides: [1; 5],
        interleave: 0,
        swizzle: 3,
        nan_fill: false,
    }
}

/// A product D[m][n] = A[m][64] * B[n][64]ᵀ in bf16.
#[derive(Clone, Copy)]
struct Product {
    m: u32,
    n: u32,
    /// A comes from tensor memory, where each thread has stored its row.
    a_tmem: bool,
    /// Two blocks: each brings half of A's rows and half of B's columns.
    pair: bool,
    /// Lane from which rows of D's columns 4 to 11 are shifted behind the products, and how they are read.
    shift: Option<(u32, RowShift)>,
    /// Number of products whose A is shifted behind them, before the product that counts.
    ashift: u32,
    flaw: Flaw,
}

impl Product {
    fn new(m: u32, n: u32) -> Self {
        Self { m, n, a_tmem: false, pair: false, shift: None, ashift: 0, flaw: Flaw::None }
    }

    fn blocks(self) -> u32 {
        1 + u32::from(self.pair)
    }

    /// Columns of tensor memory that D takes in one block.
    fn columns(self) -> u32 {
        if self.pair && self.m == 128 { self.n / 2 } else { self.n }
    }

    /// Row and column of D, of register `r` that thread `t` of block `rank` stores for the columns from `c` on.
    fn element(self, rank: u32, t: u32, c: u32, r: u32) -> (u32, u32) {
        let (warp, l) = (t / 32, t % 32);
        match (self.pair, self.m) {
            // Sixteen rows a warp, by the fragment of 16x256b.
            (false, 64) => (warp * 16 + l / 4 + 8 * (r / 2), c + r % 2 + 2 * (l % 4)),
            (true, 128) => (rank * 64 + t % 64, t / 64 * (self.n / 2) + c + r),
            _ => (rank * 128 + t, c + r),
        }
    }

    /// The lane that had the contents that lane `t` has of a column of tensor memory when all is done.
    fn source(self, t: u32, column: u32) -> u32 {
        match self.shift {
            Some((first, way)) if t / 32 == first / 32 && (4..12).contains(&column) => match way {
                RowShift::ToNext => t.max(first + 1) - 1,
                RowShift::FromNext => (t + 1).min(first + 31),
            },
            _ => t,
        }
    }

    /// The row of A that lies in lane `m` of its block when the product that counts begins.
    fn row_of_a(self, m: u32) -> u32 {
        m / 32 * 32 + (m % 32 + self.ashift).min(31)
    }

    /// Columns that one `tcgen05.ld` reads, and its registers.
    fn step(self) -> (u32, u32) {
        if !self.pair && self.m == 64 { (8, 4) } else { (32, 32) }
    }
}

/// The kernel: each warp stores the lanes of D that it reaches, a register after the other.
fn kernel(p: Product) -> String {
    let Product { m, n, flaw, .. } = p;
    let group = p.blocks();
    let idesc = 1u32 << 4 | 1 << 7 | 1 << 10 | (n / 8) << 17 | (m / 16) << 24;
    let desc = 2u64 << 61 | 1 << 46 | (1024u64 >> 4) << 32 | 1 << 16;
    let a = if p.a_tmem { "[%at]" } else { "%da" };
    let mut products = String::new();
    for pass in 0..=p.ashift {
        let shift = if pass < p.ashift { ".ashift" } else { "" };
        for i in 0..4 {
            products.push_str(&format!(
                "setp.ne.u32 %q, {i}, 0;
                 @%lead tcgen05.mma.cta_group::{group}.kind::f16{shift} [%tm], {a}, %db, {idesc}, %q;
                 add.s64 %da, %da, 2; add.s64 %db, %db, 2; add.u32 %at, %at, 8;\n"
            ));
        }
        products.push_str("sub.s64 %da, %da, 8; sub.s64 %db, %db, 8; sub.u32 %at, %at, 32;\n");
    }
    let wait = |bar: &str, label: &str| {
        format!("{label}: mbarrier.try_wait.parity.shared::cta.b64 %q, [{bar}], 0; @!%q bra {label};")
    };
    let regs = |count: u32| (0..count).map(|i| format!("%v{i}")).collect::<Vec<_>>().join(",");
    let done = match flaw {
        Flaw::NoWait => String::new(),
        Flaw::ReadsA => {
            let load = format!("tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{}}}, [%ts];", regs(32));
            load + "tcgen05.wait::ld.sync.aligned;" + &wait("%done", "WD")
        }
        _ => wait("%done", "WD"),
    };
    let other_warp = if flaw == Flaw::WrongWarp { "add.u32 %r, %r, 1; and.b32 %r, %r, 3;" } else { "" };
    let (step, count) = p.step();
    let shape = if step == 8 { "16x256b.x1" } else { "32x32b.x32" };
    let mut reads = String::new();
    for (i, c) in (0..p.columns()).step_by(step as usize).enumerate() {
        reads.push_str(&format!(
            "tcgen05.ld.sync.aligned.{shape}.b32 {{{}}}, [%tl+{c}]; tcgen05.wait::ld.sync.aligned;\n",
            regs(count)
        ));
        for r in 0..count {
            reads.push_str(&format!("st.global.b32 [%out+{}], %v{r};\n", (i as u32 * count + r) * 512));
        }
    }
    let columns = if p.a_tmem { 512 } else { 256 };
    let dealloc =
        format!("@!%w bra D1; tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tm, {columns}; D1:");
    let dealloc = match flaw {
        Flaw::Leak => String::new(),
        Flaw::FreedTwice => format!("{dealloc} {}", dealloc.replace("D1", "D2")),
        _ => dealloc,
    };
    let rows_a = m / group;
    let (store_a, load_a) = if p.a_tmem {
        let loads: String = (0..32).map(|i| format!("ld.global.b32 %v{i}, [%ra+{}];", 4 * i)).collect();
        let store = format!(
            "mul.wide.u32 %off, %t, 128; ld.param.u64 %ra, [pa]; add.s64 %ra, %ra, %off; {loads}
             tcgen05.st.sync.aligned.32x32b.x32.b32 [%ts], {{{}}}; tcgen05.wait::st.sync.aligned;
             tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;",
            regs(32)
        );
        (store, String::new())
    } else {
        let load = format!(
            "mul.lo.u32 %r, %rank, {rows_a};
             @%p cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%a], [ma, {{0, %r}}], [%bar];"
        );
        (String::new(), load)
    };
    let bytes = if p.a_tmem { n / group * 128 } else { (rows_a + n / group) * 128 };
    let (cluster, commit) = barrier_and_commit(p.pair);
    let shift = p.shift.map_or_else(String::new, |(lane, _)| {
        format!("@%lead tcgen05.shift.cta_group::{group}.down [%tm+{}];", lane << 16 | 4)
    });
    let (shift, late_shift) =
        if flaw == Flaw::ShiftAfterCommit { (String::new(), shift) } else { (shift, String::new()) };
    format!(
        ".version 8.6\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 raw[];
        .visible .entry k(.param .align 64 .b8 ma[128], .param .align 64 .b8 mb[128], .param .u64 o, .param .u64 pa) {{
        .reg .pred %p, %q, %w, %lead; .reg .b16 %both;
        .reg .b32 %t, %a, %b, %bar, %done, %slot, %tm, %tl, %ts, %at, %r, %rank, %v<32>; .reg .b64 %da, %db, %out, %off, %ra;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; setp.lt.u32 %w, %t, 32;
        mov.u32 %rank, %cluster_ctarank; setp.eq.and.u32 %lead, %rank, 0, %p; mov.b16 %both, 3;
        mov.u32 %a, raw; add.u32 %b, %a, 16384; add.u32 %bar, %b, 32768; add.u32 %done, %bar, 8; add.u32 %slot, %bar, 16;
        @%p mbarrier.init.shared::cta.b64 [%bar], 1; @%p mbarrier.init.shared::cta.b64 [%done], 1;
        @%p fence.mbarrier_init.release.cluster;
        @!%w bra A1; tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%slot], {columns};
        tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned; A1:
        tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
        ld.shared.b32 %tm, [%slot];
        @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {bytes};
        {load_a}
        mul.lo.u32 %r, %rank, {};
        @%p cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%b], [mb, {{0, %r}}], [%bar];
        shr.u32 %r, %t, 5; {other_warp} shl.b32 %r, %r, 21; add.u32 %tl, %tm, %r; add.u32 %ts, %tl, 256; add.u32 %at, %tm, 256;
        {store_a}
        {}
        {cluster}
        shr.u32 %a, %a, 4; cvt.u64.u32 %da, %a; or.b64 %da, %da, {desc};
        shr.u32 %b, %b, 4; cvt.u64.u32 %db, %b; or.b64 %db, %db, {desc};
        {products}
        {shift}
        {commit}
        {late_shift}
        {done}
        tcgen05.fence::after_thread_sync;
        mul.wide.u32 %off, %t, 4; ld.param.u64 %out, [o]; add.s64 %out, %out, %off;
        mul.wide.u32 %off, %rank, {}; add.s64 %out, %out, %off;
        {reads}
        tcgen05.fence::before_thread_sync; bar.sync 0; {dealloc} {cluster} ret; }}",
        n / group,
        wait("%bar", "WB"),
        p.columns() / step * count * 512,
    )
}

fn product(p: Product, options: &Options) -> Result<(), Fault> {
    changed_product(p, options, |text| text)
}

/// The product, its kernel's text changed.
fn changed_product(p: Product, options: &Options, change: impl Fn(String) -> String) -> Result<(), Fault> {
    let Product { m, n, .. } = p;
    let device = Device::new();
    let mut random = Random(u64::from(m + n));
    let mut values = |rows: u32| -> Vec<i32> { (0..rows * 64).map(|_| random.small(3)).collect() };
    let (a, b) = (values(m), values(n));
    let bytes = |v: &[i32]| -> Vec<u8> {
        v.iter().flat_map(|x| half::bf16::from_f32(*x as f32).to_bits().to_le_bytes()).collect()
    };
    let (step, count) = p.step();
    let words = p.columns() / step * count * 128;
    let out = device.alloc(u64::from(p.blocks() * words) * 4);
    let (pa, pb) = (upload_bytes(&device, &bytes(&a)), upload_bytes(&device, &bytes(&b)));
    let mut args = Vec::new();
    args.extend(map(pa, m, m / p.blocks()).encode());
    args.extend(map(pb, n, n / p.blocks()).encode());
    args.extend(out.to_le_bytes());
    args.extend(pa.to_le_bytes());
    let mut config = block(128, 65536);
    (config.grid[0], config.cluster[0]) = (p.blocks(), p.blocks());
    let mut options = options.clone();
    options.row_shift = p.shift.map_or(options.row_shift, |(_, way)| way);
    run(&device, &change(kernel(p)), &config, &args, &options)?;
    let got = download(&device, out, (p.blocks() * words) as usize);
    let mut seen = vec![false; (m * n) as usize];
    for (i, bits) in got.into_iter().enumerate() {
        let (rank, at) = (i as u32 / words, i as u32 % words);
        let (t, register) = (at % 128, at / 128);
        let place = |t| p.element(rank, t, register / count * step, register % count);
        let (row, column) = place(t);
        seen[(row * n + column) as usize] = true;
        let (row, column) = place(p.source(t, register / count * step + register % count));
        let (x, y) = (p.row_of_a(row) as usize * 64, column as usize * 64);
        let want: i32 = (0..64).map(|k| a[x + k] * b[y + k]).sum();
        assert_eq!(f32::from_bits(bits), want as f32, "M {m} N {n} ({row}, {column})");
    }
    assert!(seen.iter().all(|&seen| seen), "M {m} N {n}: not every element of D was stored");
    Ok(())
}

#[test]
fn a_product_in_tensor_memory_is_the_integer_product() {
    for n in [32, 128, 256] {
        product(Product::new(128, n), &checked()).unwrap_or_else(|f| panic!("N {n}: {f}"));
    }
}

#[test]
fn sixty_four_rows_lie_sixteen_to_a_warp() {
    for n in [8, 72, 256] {
        product(Product::new(64, n), &checked()).unwrap_or_else(|f| panic!("N {n}: {f}"));
    }
}

#[test]
fn a_from_tensor_memory_is_the_row_that_a_thread_stored() {
    for n in [32, 256] {
        let p = Product { a_tmem: true, ..Product::new(128, n) };
        product(p, &checked()).unwrap_or_else(|f| panic!("N {n}: {f}"));
    }
}

#[test]
fn two_blocks_share_a_product() {
    for (m, n) in [(256, 64), (256, 256), (128, 64), (128, 256)] {
        let p = Product { pair: true, ..Product::new(m, n) };
        product(p, &checked()).unwrap_or_else(|f| panic!("M {m} N {n}: {f}"));
    }
}

#[test]
fn a_pair_needs_its_commit_in_both_blocks() {
    let p = Product { pair: true, flaw: Flaw::NoWait, ..Product::new(256, 64) };
    let fault = product(p, &checked()).unwrap_err();
    assert!(fault.kind == FaultKind::Race || fault.text.contains("nothing has written"), "{fault}");
}

#[test]
fn a_shift_moves_eight_columns_of_one_warps_rows_behind_the_products() {
    for way in [RowShift::ToNext, RowShift::FromNext] {
        for (m, pair) in [(128, false), (256, true)] {
            for lane in [0, 32, 96] {
                let p = Product { pair, shift: Some((lane, way)), ..Product::new(m, 32) };
                product(p, &checked()).unwrap_or_else(|f| panic!("{way:?} M {m} lane {lane}: {f}"));
            }
        }
    }
    // The last row is the one to be refreshed behind it, unless the launch has another option.
    assert_eq!(Options::default().row_shift, RowShift::FromNext);
}

#[test]
fn a_shift_is_complete_only_when_a_commit_behind_it_is_waited_for() {
    for (m, pair) in [(128, false), (256, true)] {
        let shift = Some((32, RowShift::ToNext));
        let p = Product { pair, shift, flaw: Flaw::ShiftAfterCommit, ..Product::new(m, 32) };
        let fault = product(p, &checked()).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Race, "{fault}");
        assert!(fault.text.contains("tensor memory lanes 32 to 63 column 4"), "{fault}");
    }
}

#[test]
fn a_shift_begins_at_a_lane_that_a_warp_begins_at() {
    let refused = |lane| {
        let p = Product { shift: Some((lane, RowShift::ToNext)), ..Product::new(128, 32) };
        product(p, &checked()).unwrap_err()
    };
    let fault = refused(16);
    assert_eq!(fault.kind, FaultKind::Misaligned, "{fault}");
    assert!(fault.text.contains("lane 16"), "{fault}");
    assert_eq!(refused(128).kind, FaultKind::TensorMemory);
}

#[test]
fn a_pair_needs_a_peer_block() {
    // The third block of a cluster of three has none.
    let p = kernel(Product { pair: true, ..Product::new(256, 32) });
    let device = Device::new();
    let data = upload_bytes(&device, &[0; 32768]);
    let mut args = Vec::new();
    args.extend(map(data, 256, 128).encode());
    args.extend(map(data, 32, 16).encode());
    args.extend(device.alloc(3 * 16384).to_le_bytes());
    args.extend(data.to_le_bytes());
    let mut config = block(128, 65536);
    (config.grid[0], config.cluster[0]) = (3, 3);
    let fault = run(&device, &p, &config, &args, &Options::default()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::TensorMemory, "{fault}");
    assert!(fault.text.contains("without a peer block"), "{fault}");
}

#[test]
fn a_product_that_shifts_a_takes_it_as_it_lies_and_leaves_it_shifted() {
    for ashift in [1, 2, 40] {
        let p = Product { a_tmem: true, ashift, ..Product::new(128, 32) };
        product(p, &checked()).unwrap_or_else(|f| panic!("{ashift} times: {f}"));
    }
}

#[test]
fn a_shift_of_a_is_complete_only_when_a_commit_behind_it_is_waited_for() {
    let p = |ashift| Product { a_tmem: true, ashift, flaw: Flaw::ReadsA, ..Product::new(128, 32) };
    product(p(0), &checked()).unwrap_or_else(|f| panic!("reading what a product reads: {f}"));
    let fault = product(p(1), &checked()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Race, "{fault}");
    let of_a = fault.text.contains("tensor memory lanes") && fault.text.contains("column 256 of");
    assert!(of_a && fault.text.starts_with("write"), "{fault}");
}

#[test]
fn a_is_shifted_in_tensor_memory_only_and_not_out_of_the_collector() {
    let text = kernel(Product { a_tmem: true, ashift: 1, ..Product::new(128, 32) });
    let from_shared = text.replace(", [%at], ", ", %da, ");
    let kept = text.replace(".ashift ", ".ashift.collector::a::use ");
    for text in [from_shared, kept] {
        let line = text.lines().position(|line| line.contains(".ashift")).unwrap() + 1;
        let fault = Device::new().load(&text).unwrap_err();
        assert_eq!((fault.kind, fault.line as usize), (FaultKind::Unsupported, line), "{fault}");
        assert!(fault.text.contains("ashift"), "{fault}");
    }
    // M 64 is refused, though A has its rows.
    let m = |rows: u32| format!("{}, %q;", 1u32 << 4 | 1 << 7 | 1 << 10 | 4 << 17 | (rows / 16) << 24);
    assert!(text.contains(&m(128)));
    let device = Device::new();
    let data = upload_bytes(&device, &[0; 32768]);
    let mut args = Vec::new();
    args.extend(map(data, 128, 128).encode());
    args.extend(map(data, 32, 32).encode());
    args.extend(device.alloc(32 * 512).to_le_bytes());
    args.extend(data.to_le_bytes());
    let text = text.replace(&m(128), &m(64));
    let fault = run(&device, &text, &block(128, 65536), &args, &checked()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Descriptor, "{fault}");
    assert!(fault.text.contains("M 64"), "{fault}");
}

#[test]
fn each_misuse_of_tensor_memory_has_its_name() {
    let found = |flaw| product(Product { flaw, ..Product::new(128, 64) }, &checked()).unwrap_err();
    assert_eq!(found(Flaw::WrongWarp).kind, FaultKind::TensorMemory);
    assert!(found(Flaw::WrongWarp).text.contains("reaches lanes"));
    assert_eq!(found(Flaw::Leak).kind, FaultKind::TensorMemory);
    assert_eq!(found(Flaw::FreedTwice).kind, FaultKind::TensorMemory);
    let race = found(Flaw::NoWait);
    assert!(race.kind == FaultKind::Race || race.text.contains("nothing has written"), "{race}");
}

#[test]
fn every_wait_and_fence_around_tensor_memory_is_needed() {
    // Each with how often the kernel has it, and the one to leave out; A is stored to tensor memory by every warp.
    let p = Product { a_tmem: true, ..Product::new(128, 32) };
    let text = kernel(p);
    product(p, &checked()).unwrap_or_else(|f| panic!("whole: {f}"));
    let mut loose = checked();
    loose.strict_tensor_memory = false;
    for (instruction, which, kind) in [
        ("tcgen05.wait::ld.sync.aligned;", 0, FaultKind::RegisterInFlight),
        ("tcgen05.wait::st.sync.aligned;", 0, FaultKind::Race),
        // Placed behind the allocation, and behind the stores.
        ("tcgen05.fence::before_thread_sync;", 1, FaultKind::Race),
        ("tcgen05.fence::after_thread_sync;", 1, FaultKind::Race),
        // Placed behind the commit.
        ("tcgen05.fence::after_thread_sync;", 2, FaultKind::Race),
    ] {
        let (at, _) = text.match_indices(instruction).nth(which).unwrap();
        let without = |text: String| format!("{}{}", &text[..at], &text[at + instruction.len()..]);
        let fault = changed_product(p, &checked(), without).unwrap_err();
        assert_eq!(fault.kind, kind, "{instruction} number {which}: {fault}");
        changed_product(p, &loose, without).unwrap_or_else(|f| panic!("{instruction} {which}, relaxed: {f}"));
    }
}

#[test]
fn a_load_that_reduces_gives_each_lane_its_row_s_maximum() {
    let text = ".version 8.8\n.target sm_103a\n.address_size 64\n.extern .shared .align 16 .b8 raw[];
        .visible .entry k(.param .u64 o, .param .u64 i) {
        .reg .b32 %t, %l, %slot, %tm, %ts, %m, %v<8>, %w<8>; .reg .b64 %out, %in, %off;
        mov.u32 %t, %tid.x; mov.u32 %slot, raw;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 32; ld.shared.b32 %tm, [%slot];
        mul.wide.u32 %off, %t, 32; ld.param.u64 %in, [i]; add.s64 %in, %in, %off;
        LOADS
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%tm], {%v0, %v1, %v2, %v3, %v4, %v5, %v6, %v7};
        tcgen05.wait::st.sync.aligned;
        tcgen05.ld.red.sync.aligned.32x32b.x8.max.f32 {%w0, %w1, %w2, %w3, %w4, %w5, %w6, %w7}, %m, [%tm];
        tcgen05.wait::ld.sync.aligned;
        mul.wide.u32 %off, %t, 8; ld.param.u64 %out, [o]; add.s64 %out, %out, %off;
        st.global.b32 [%out], %m; st.global.b32 [%out+4], %w5;
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 32; ret; }";
    let loads: String = (0..8).map(|i| format!("ld.global.b32 %v{i}, [%in+{}];", 4 * i)).collect();
    let device = Device::new();
    let mut random = Random(9);
    let values: Vec<f32> = (0..256).map(|_| random.small(100) as f32).collect();
    let input = upload_bytes(&device, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    let out = device.alloc(256);
    let args: Vec<u8> = [out, input].iter().flat_map(|x| x.to_le_bytes()).collect();
    run(&device, &text.replace("LOADS", &loads), &block(32, 64), &args, &checked()).unwrap();
    for (lane, pair) in download(&device, out, 64).chunks(2).enumerate() {
        let row = &values[8 * lane..8 * lane + 8];
        let most = row.iter().copied().reduce(f32::max).unwrap();
        assert_eq!([f32::from_bits(pair[0]), f32::from_bits(pair[1])], [most, row[5]], "lane {lane}");
    }
}
