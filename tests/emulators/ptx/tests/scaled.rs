//! Block-scaled `tcgen05.mma`: factors that `tcgen05.cp` brings to tensor memory, against a product of numbers that are
//! exact in single precision. PTX ISA 9.7.16.10.7.

#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

mod common;

use common::{Random, barrier_and_commit, block, checked, download, run, upload_bytes};
use fmha_emu_ptx::{Device, Fault, FaultKind};

/// Products, 32 bytes of a row each.
const STEPS: u32 = 4;
const M: u32 = 128;

/// A kind, with the factors of a row in one product.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Kind {
    qualifiers: &'static str,
    per_row: u32,
    four_bits: bool,
    e8m0: bool,
    /// Type codes of A and B in the instruction descriptor.
    types: [u32; 2],
}

const E4M3: Kind = Kind {
    qualifiers: "kind::mxf8f6f4.block_scale.scale_vec::1X",
    per_row: 1,
    four_bits: false,
    e8m0: true,
    types: [0, 0],
};
const NVFP4: Kind = Kind {
    qualifiers: "kind::mxf4nvf4.block_scale.scale_vec::4X",
    per_row: 4,
    four_bits: true,
    e8m0: false,
    types: [1, 1],
};
const KINDS: [Kind; 6] = [
    E4M3,
    Kind { types: [1, 0], ..E4M3 },
    NVFP4,
    Kind { e8m0: true, ..NVFP4 },
    Kind { qualifiers: "kind::mxf4.block_scale", per_row: 2, e8m0: true, ..NVFP4 },
    Kind { qualifiers: "kind::mxf4nvf4.block_scale.block32", per_row: 2, e8m0: true, ..NVFP4 },
];

/// D[128][n] = (A * scale_A) (B * scale_B)ᵀ, of two blocks D[256][n].
#[derive(Clone, Copy, Debug)]
struct Product {
    kind: Kind,
    n: u32,
    a_tmem: bool,
    pair: bool,
}

impl Product {
    fn new(kind: Kind, n: u32) -> Self {
        Self { kind, n, a_tmem: false, pair: false }
    }

    fn blocks(self) -> u32 {
        1 + u32::from(self.pair)
    }

    /// Elements of a row.
    fn k(self) -> u32 {
        STEPS * if self.kind.four_bits { 64 } else { 32 }
    }

    fn factors_of_row(self) -> u32 {
        STEPS * self.kind.per_row
    }

    fn instruction(self, step: u32) -> u32 {
        let [a, b] = self.kind.types;
        // Factors of the steps follow each other in a word.
        let id = step * self.kind.per_row % 4;
        id << 4
            | a << 7
            | b << 10
            | (self.n / 8) << 17
            | u32::from(self.kind.e8m0) << 23
            | self.blocks() << 27
            | id << 29
    }

    /// Rows of B in one block's shared memory.
    fn own_n(self) -> u32 {
        self.n / self.blocks()
    }

    /// Places in shared memory: A, B, their factors, the end.
    fn places(self) -> [u32; 5] {
        let words = self.factors_of_row() / 4;
        let sizes =
            [M * 32 * STEPS, self.own_n() * 32 * STEPS, 512 * words, 512 * words * self.n.div_ceil(128)];
        let mut at = 0;
        let mut places = [0; 5];
        for (place, size) in places[1..].iter_mut().zip(sizes) {
            at += size;
            *place = at;
        }
        places
    }
}

const COLUMN_A: u32 = 256;
const COLUMN_FACTORS_A: u32 = 320;
const COLUMN_FACTORS_B: u32 = 352;

fn kernel(p: Product) -> String {
    let group = p.blocks();
    let [_, b, factors_a, factors_b, end] = p.places();
    let mut copies = String::new();
    let words = p.factors_of_row() / 4;
    // Rows of 16 bytes, eight of them adjacent: one tile is 512 bytes side by side.
    let tile_desc = |at: u32| u64::from(at >> 4) | (128u64 >> 4) << 32 | 1 << 46;
    let b_tiles = p.n.div_ceil(128);
    for (first, column, tiles) in [(factors_a, COLUMN_FACTORS_A, 1), (factors_b, COLUMN_FACTORS_B, b_tiles)] {
        for tile in 0..words * tiles {
            copies.push_str(&format!(
                "add.s64 %d, %base, {}; add.u32 %x, %tm, {};
                 @%lead tcgen05.cp.cta_group::{group}.32x128b.warpx4 [%x], %d;\n",
                tile_desc(first + 512 * tile),
                column + 4 * tile
            ));
        }
    }
    // Chunks of 16 bytes along K lie 128 bytes apart, groups of eight rows 256.
    let desc = |at: u32| u64::from(at >> 4) | (128u64 >> 4) << 16 | (256u64 >> 4) << 32 | 1 << 46;
    let mut products = String::new();
    for step in 0..STEPS {
        let word = step * p.kind.per_row / 4;
        let a = if p.a_tmem { format!("[%at+{}]", 8 * step) } else { "%d".to_owned() };
        products.push_str(&format!(
            "add.s64 %d, %base, {}; add.s64 %db, %base, {}; setp.ne.u32 %q, {step}, 0;
             @%lead tcgen05.mma.cta_group::{group}.{} [%tm], {a}, %db, {}, [%tm+{}], [%tm+{}], %q;\n",
            desc(M * 32 * step),
            desc(b + p.own_n() * 32 * step),
            p.kind.qualifiers,
            p.instruction(step),
            COLUMN_FACTORS_A + 4 * word,
            COLUMN_FACTORS_B + 4 * word * b_tiles,
        ));
    }
    let regs = (0..32).map(|i| format!("%v{i}")).collect::<Vec<_>>().join(",");
    let mut reads = String::new();
    for c in (0..p.n).step_by(32) {
        reads.push_str(&format!(
            "tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{regs}}}, [%tl+{c}]; tcgen05.wait::ld.sync.aligned;\n"
        ));
        let row = |i: u32| format!("st.global.b32 [%out+{}], %v{i};", 4 * (c + i));
        reads.extend((0..32).map(row));
    }
    // A's rows as the image has them, for tensor memory: 32 bytes a step.
    let mut stores = String::new();
    if p.a_tmem {
        for step in 0..STEPS {
            for half in 0..2 {
                let v = |i: u32| format!("%v{}", 4 * half + i);
                stores.push_str(&format!(
                    "ld.shared.v4.b32 {{{}, {}, {}, {}}}, [%own+{}];\n",
                    v(0),
                    v(1),
                    v(2),
                    v(3),
                    M * 32 * step + 128 * half
                ));
            }
            stores.push_str(&format!(
                "tcgen05.st.sync.aligned.32x32b.x8.b32 [%tl+{}], {{%v0,%v1,%v2,%v3,%v4,%v5,%v6,%v7}};\n",
                COLUMN_A + 8 * step
            ));
        }
        stores.push_str("tcgen05.wait::st.sync.aligned;\n");
    }
    let (cluster, commit) = barrier_and_commit(p.pair);
    format!(
        ".version 8.7\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 raw[];
        .visible .entry k(.param .u64 o, .param .u64 image) {{
        .reg .pred %p, %q, %w, %lead; .reg .b16 %both;
        .reg .b32 %t, %a, %x, %done, %slot, %tm, %tl, %at, %own, %rank, %v<32>; .reg .b64 %d, %db, %base, %out, %in, %off;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; setp.lt.u32 %w, %t, 32;
        mov.u32 %rank, %cluster_ctarank; setp.eq.and.u32 %lead, %rank, 0, %p; mov.b16 %both, 3;
        mov.u32 %a, raw; add.u32 %done, %a, {end}; add.u32 %slot, %done, 8;
        @%p mbarrier.init.shared::cta.b64 [%done], 1; @%p fence.mbarrier_init.release.cluster;
        @!%w bra A1; tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%slot], 512;
        tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned; A1:
        ld.param.u64 %in, [image]; mul.wide.u32 %off, %rank, {end}; add.s64 %in, %in, %off;
        mul.wide.u32 %off, %t, 16; add.s64 %in, %in, %off; shl.b32 %x, %t, 4;
        L: setp.ge.u32 %q, %x, {end}; @%q bra E; add.u32 %own, %a, %x;
        ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%in]; st.shared.v4.b32 [%own], {{%v0, %v1, %v2, %v3}};
        add.u32 %x, %x, 2048; add.s64 %in, %in, 2048; bra L; E:
        fence.proxy.async.shared::cta;
        tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
        ld.shared.b32 %tm, [%slot];
        shr.u32 %x, %t, 5; shl.b32 %x, %x, 21; add.u32 %tl, %tm, %x; add.u32 %at, %tm, {COLUMN_A};
        shr.u32 %x, %t, 3; shl.b32 %x, %x, 8; and.b32 %own, %t, 7; shl.b32 %own, %own, 4;
        add.u32 %own, %own, %x; add.u32 %own, %own, %a;
        {stores}
        tcgen05.fence::before_thread_sync; bar.sync 0; {cluster} tcgen05.fence::after_thread_sync;
        shr.u32 %x, %a, 4; and.b32 %x, %x, 16383; cvt.u64.u32 %base, %x;
        {copies}
        {products}
        {commit}
        WD: mbarrier.try_wait.parity.shared::cta.b64 %q, [%done], 0; @!%q bra WD;
        tcgen05.fence::after_thread_sync;
        mad.lo.u32 %x, %rank, {M}, %t; mul.wide.u32 %off, %x, {}; ld.param.u64 %out, [o]; add.s64 %out, %out, %off;
        {reads}
        tcgen05.fence::before_thread_sync; bar.sync 0; {cluster}
        @!%w bra D1; tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tm, 512; D1: {cluster} ret; }}",
        4 * p.n,
    )
}

/// A number by its code: E2M1, or FP8 with so many bits of mantissa.
fn number(code: u32, bits: u32, mantissa: u32) -> f32 {
    let exponents = bits - 1 - mantissa;
    let bias = (1 << (exponents - 1)) - 1;
    let (exponent, fraction) = ((code & ((1 << (bits - 1)) - 1)) >> mantissa, code & ((1 << mantissa) - 1));
    let steps = if exponent == 0 { fraction } else { fraction | 1 << mantissa };
    let magnitude = steps as f32 * 2f32.powi(exponent.max(1) as i32 - bias - mantissa as i32);
    if code >> (bits - 1) != 0 { -magnitude } else { magnitude }
}

/// An operand: the codes of its elements and of its factors, and its values.
struct Operand {
    rows: u32,
    codes: Vec<u32>,
    factors: Vec<u8>,
    values: Vec<f32>,
}

impl Operand {
    fn random(p: Product, rows: u32, of_type: u32, random: &mut Random) -> Self {
        let mut below = |most: i32| (random.small(1 << 20) + (1 << 20)) as u32 % most as u32;
        let (mut codes, mut factors, mut values) = (vec![], vec![], vec![]);
        let block = p.k() / p.factors_of_row();
        for _ in 0..rows * p.factors_of_row() {
            let (byte, factor) = if p.kind.e8m0 {
                let byte = 125 + below(5) as u8;
                (byte, 2f32.powi(i32::from(byte) - 127))
            } else {
                // The sign bit of a UE4M3 factor counts for nothing.
                let byte = 48 + below(24);
                ((byte | below(2) << 7) as u8, number(byte, 8, 3))
            };
            factors.push(byte);
            for _ in 0..block {
                let (code, value) = match (p.kind.four_bits, of_type) {
                    (true, _) => (below(16), 0.0),
                    // Numbers of few digits near 1, so that sums are exact.
                    (false, 0) => ((48 + below(24)) | below(2) << 7, 3.0),
                    (false, _) => ((56 + below(12)) | below(2) << 7, 2.0),
                };
                let value = if p.kind.four_bits { number(code, 4, 1) } else { number(code, 8, value as u32) };
                codes.push(code);
                values.push(value * factor);
            }
        }
        Self { rows, codes, factors, values }
    }

    /// Rows `[first, first + rows)` as shared memory has them.
    fn image(&self, p: Product, first: u32, rows: u32) -> Vec<u8> {
        let mut image = vec![0; (rows * 32 * STEPS) as usize];
        for row in 0..rows {
            for byte in 0..32 * STEPS {
                let at = |i: u32| self.codes[((first + row) * p.k() + i) as usize] as u8;
                let value = if p.kind.four_bits { at(2 * byte) | at(2 * byte + 1) << 4 } else { at(byte) };
                let (step, byte) = (byte / 32, byte % 32);
                let to = rows * 32 * step + row / 8 * 256 + byte / 16 * 128 + row % 8 * 16 + byte % 16;
                image[to as usize] = value;
            }
        }
        image
    }

    /// Factors of rows from `first` on, in tiles of 128 rows and 4 factors; those of one word follow each other.
    fn tiles(&self, p: Product, first: u32, rows: u32) -> Vec<u8> {
        let (words, tiles) = (p.factors_of_row() / 4, rows.div_ceil(128));
        let mut image = vec![0; (512 * words * tiles) as usize];
        for row in 0..rows {
            for i in 0..p.factors_of_row() {
                let tile = i / 4 * tiles + row / 128;
                let to = 512 * tile + row % 32 * 16 + row % 128 / 32 * 4 + i % 4;
                image[to as usize] = self.factors[((first + row) * p.factors_of_row() + i) as usize];
            }
        }
        image
    }
}

fn product(p: Product) -> Result<(), Fault> {
    changed_product(p, |text| text)
}

/// The product, its kernel's text changed: right in every element.
fn changed_product(p: Product, change: impl Fn(String) -> String) -> Result<(), Fault> {
    for (at, got, want) in elements(p, change)? {
        assert_eq!(got, want, "{p:?} {at:?}");
    }
    Ok(())
}

/// Place of an element, row and column; what a product gave there, and what it should be.
type Element = ([usize; 2], f64, f64);

/// Every element of a product, its kernel's text changed.
fn elements(p: Product, change: impl Fn(String) -> String) -> Result<Vec<Element>, Fault> {
    let mut random = Random(u64::from(p.n) + 7);
    let a = Operand::random(p, M * p.blocks(), p.kind.types[0], &mut random);
    let b = Operand::random(p, p.n, p.kind.types[1], &mut random);
    let mut image = vec![];
    for rank in 0..p.blocks() {
        image.extend(a.image(p, rank * M, M));
        image.extend(b.image(p, rank * p.own_n(), p.own_n()));
        image.extend(a.tiles(p, rank * M, M));
        image.extend(b.tiles(p, 0, p.n));
    }
    let device = Device::new();
    let out = device.alloc(u64::from(a.rows * p.n) * 4);
    let image = upload_bytes(&device, &image);
    let args: Vec<u8> = [out, image].iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut config = block(128, p.places()[4] + 64);
    (config.grid[0], config.cluster[0]) = (p.blocks(), p.blocks());
    run(&device, &change(kernel(p)), &config, &args, &checked())?;
    let k = p.k() as usize;
    let found = download(&device, out, (a.rows * p.n) as usize).into_iter().enumerate();
    Ok(found
        .map(|(i, bits)| {
            let (row, column) = (i / p.n as usize, i % p.n as usize);
            let pairs = a.values[row * k..][..k].iter().zip(&b.values[column * k..][..k]);
            let want = pairs.map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
            ([row, column], f64::from(f32::from_bits(bits)), want)
        })
        .collect())
}

#[test]
fn a_block_scaled_product_is_that_of_the_scaled_numbers() {
    for kind in KINDS {
        for n in [32, 96, 256] {
            product(Product::new(kind, n)).unwrap_or_else(|f| panic!("{kind:?} N {n}: {f}"));
        }
    }
}

#[test]
fn a_from_tensor_memory_is_scaled_too() {
    for kind in [E4M3, NVFP4] {
        let p = Product { a_tmem: true, ..Product::new(kind, 64) };
        product(p).unwrap_or_else(|f| panic!("{kind:?}: {f}"));
    }
}

#[test]
fn a_pair_has_the_factors_of_its_own_rows_and_of_all_columns() {
    for kind in [E4M3, NVFP4] {
        let p = Product { pair: true, ..Product::new(kind, 64) };
        product(p).unwrap_or_else(|f| panic!("{kind:?}: {f}"));
    }
}

#[test]
fn a_factor_of_nan_reaches_its_rows_alone() {
    // The words of E8M0 factors of the first tile's first row are all 255.
    let p = Product::new(E4M3, 32);
    let [_, _, factors_a, ..] = p.places();
    let nan = |text: String| {
        text.replace(
            "fence.proxy.async.shared::cta;",
            &format!(
                "mov.b32 %v0, -1; @%p st.shared.b32 [%a+{factors_a}], %v0; fence.proxy.async.shared::cta;"
            ),
        )
    };
    for ([row, column], got, want) in elements(p, nan).unwrap_or_else(|fault| panic!("{fault}")) {
        assert!(if row == 0 { got.is_nan() } else { got == want }, "({row}, {column}): {got}, not {want}");
    }
}

#[test]
fn copies_that_differ_between_the_warps_parts_are_named() {
    // Warp 2 stores other factors of its own part over those that were copied.
    let p = Product { a_tmem: true, ..Product::new(E4M3, 32) };
    let one_step = kernel(p);
    let first_product = one_step.match_indices("add.s64 %d, %base").nth(2).unwrap().0;
    let other = "@%lead tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%done];
        W2: mbarrier.try_wait.parity.shared::cta.b64 %q, [%done], 0; @!%q bra W2; tcgen05.fence::after_thread_sync;
        mov.b32 %v0, 0; shr.u32 %x, %t, 5; setp.ne.u32 %q, %x, 2; @%q bra S2;
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%tl+320], {%v0}; tcgen05.wait::st.sync.aligned; S2:
        tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;\n";
    let fault = changed_product(p, |text| {
        let waits = text.replace("[%done], 0; @!%q bra WD;", "[%done], 1; @!%q bra WD;");
        format!("{}{other}{}", &waits[..first_product], &waits[first_product..])
    });
    let fault = fault.unwrap_err();
    assert_eq!(fault.kind, FaultKind::TensorMemory, "{fault}");
    assert!(fault.text.contains("scale factors of A of row") && fault.text.contains("differ"), "{fault}");
}

#[test]
fn an_instruction_descriptor_that_the_kind_lacks_is_refused() {
    for (kind, bit, names) in [
        (E4M3, 3, "reserved bits 0x8"),
        (E4M3, 31, "reserved bits 0x80000000"),
        (NVFP4, 12, "reserved bits 0x1000"),
        (NVFP4, 16, "along K alone"),
        (NVFP4, 31, "K 96"),
        (NVFP4, 4, "scale factor IDs [0, 1]"),
        (E4M3, 2, "sparse"),
        (E4M3, 28, "M 384"),
    ] {
        let p = Product::new(kind, 32);
        let step = p.instruction(0);
        let change =
            |text: String| text.replace(&format!("%db, {step},"), &format!("%db, {},", step | 1 << bit));
        let fault = changed_product(p, change).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Descriptor, "{fault}");
        assert!(fault.text.contains(names), "{kind:?} bit {bit}: {fault}");
    }
    // A factor type that elements of eight bits do not have.
    let p = Product::new(E4M3, 32);
    let change = |text: String| {
        (0..STEPS).fold(text, |text, step| {
            let bits = p.instruction(step);
            text.replace(&format!("%db, {bits},"), &format!("%db, {},", bits & !(1 << 23)))
        })
    };
    assert!(changed_product(p, change).unwrap_err().text.contains("UE4M3"));
}

#[test]
fn each_misuse_of_scale_factors_is_caught() {
    let overwrite = "tcgen05.st.sync.aligned.32x32b.x8.b32 [%tl+320], {%v0,%v1,%v2,%v3,%v4,%v5,%v6,%v7}; WD:";
    for (p, from, to, kind, names) in [
        // A copy of 64 rows, of which 32 are there.
        (
            Product::new(E4M3, 128),
            "32x128b.warpx4",
            "64x128b.warpx2::01_23",
            Some(FaultKind::Uninitialised),
            "tcgen05.cp",
        ),
        // Other factors in place of those that a product still reads.
        (Product::new(E4M3, 32), "WD:", overwrite, Some(FaultKind::Race), "column 320"),
        // Copies and products read what generic stores wrote, without the fence between the proxies.
        (
            Product::new(E4M3, 32),
            "fence.proxy.async.shared::cta;",
            "",
            Some(FaultKind::MissingProxyFence),
            "proxy",
        ),
        // Factors that nothing has brought.
        (
            Product::new(E4M3, 32),
            "@%lead tcgen05.cp",
            "// tcgen05.cp",
            Some(FaultKind::TensorMemory),
            "nothing",
        ),
        // Factors of four bytes a row are a whole word.
        (Product::new(NVFP4, 32), "scale_vec::4X", "scale_vec::2X", Some(FaultKind::Descriptor), "UE4M3"),
    ] {
        let fault = changed_product(p, |text| text.replace(from, to)).unwrap_err();
        assert!(kind.is_none_or(|kind| fault.kind == kind) && fault.text.contains(names), "{from}: {fault}");
    }
}
