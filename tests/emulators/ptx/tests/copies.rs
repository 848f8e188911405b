//! Copies of Blackwell whose places the ISA's text says: `tcgen05.cp` of 128 and 64 rows of 128 bits (PTX ISA
//! 9.7.16.9), and `cp.async.bulk.tensor` of four rows that coordinates name (`tile::gather4`, 5.5 and 9.7.9.27).

#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

mod common;

use common::{block, checked, download, run, upload, upload_bytes};
use fmha_emu_ptx::{Device, Fault, FaultKind, TensorMap};

/// Bytes from one group of eight rows to the next, in shared memory.
const GROUP: u32 = 256;
/// Columns that each lane has, and the first of the four that a copy writes.
const COLUMNS: u32 = 8;
const FIRST: u32 = 2;

/// Every lane's columns are set to `lane << 16 | column`; word `n` of shared memory is `0x1000 + n`. Then the copy.
fn copy_to_tensor_memory(shape: &str, wait: bool) -> Result<Vec<u32>, Fault> {
    let desc: u64 = 1 << 46 | u64::from(GROUP >> 4) << 32;
    let lines: String = (0..COLUMNS)
        .map(|c| format!("shl.b32 %v{c}, %t, 16; or.b32 %v{c}, %v{c}, {c};"))
        .chain((0..8).map(|i| {
            format!(
                "add.u32 %x, %t, {}; shl.b32 %y, %x, 2; add.u32 %y, %y, %a; add.u32 %x, %x, 0x1000;
                 st.shared.b32 [%y], %x;",
                i * 128
            )
        }))
        .collect();
    let stores: String = (0..COLUMNS).map(|c| format!("st.global.b32 [%out+{}], %v{c};", 4 * c)).collect();
    let regs = (0..COLUMNS).map(|i| format!("%v{i}")).collect::<Vec<_>>().join(",");
    let wait =
        if wait { "W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%done], 0; @!%q bra W;" } else { "" };
    let text = format!(
        ".version 8.6\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 raw[];
        .visible .entry k(.param .u64 o) {{
        .reg .pred %p, %q, %w; .reg .b32 %t, %a, %x, %y, %done, %slot, %tm, %tl, %v<8>; .reg .b64 %d, %out, %off;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; setp.lt.u32 %w, %t, 32;
        mov.u32 %a, raw; add.u32 %done, %a, 4096; add.u32 %slot, %done, 8;
        @%p mbarrier.init.shared::cta.b64 [%done], 1; @%p fence.mbarrier_init.release.cluster;
        @!%w bra A1; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 32; A1:
        {lines}
        fence.proxy.async.shared::cta;
        tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
        ld.shared.b32 %tm, [%slot]; shr.u32 %tl, %t, 5; shl.b32 %tl, %tl, 21; add.u32 %tl, %tm, %tl;
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%tl], {{{regs}}}; tcgen05.wait::st.sync.aligned;
        tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
        shr.u32 %x, %a, 4; cvt.u64.u32 %d, %x; or.b64 %d, %d, {desc};
        @%p tcgen05.cp.cta_group::1.{shape} [%tm+{FIRST}], %d;
        @%p tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%done];
        {wait}
        tcgen05.fence::after_thread_sync;
        tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{regs}}}, [%tl]; tcgen05.wait::ld.sync.aligned;
        mul.wide.u32 %off, %t, 32; ld.param.u64 %out, [o]; add.s64 %out, %out, %off; {stores}
        tcgen05.fence::before_thread_sync; bar.sync 0;
        @!%w bra D1; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 32; D1: ret; }}"
    );
    let device = Device::new();
    let out = device.alloc(128 * 32);
    run(&device, &text, &block(128, 8192), &out.to_le_bytes(), &checked())?;
    Ok(download(&device, out, 128 * COLUMNS as usize))
}

/// The row of the matrix that a lane has behind the copy: lane r has row r; of 64 rows, `02_13` gives the first half
/// to warps 0 and 2 and the second to 1 and 3, and `01_23` the first to warps 0 and 1.
#[test]
fn a_copy_of_rows_of_128_bits_gives_each_lane_its_row_and_changes_nothing_else() {
    type Row = fn(u32) -> u32;
    let shapes: [(&str, Row); 3] = [
        ("128x128b", |lane| lane),
        ("64x128b.warpx2::02_13", |lane| lane / 32 % 2 * 32 + lane % 32),
        ("64x128b.warpx2::01_23", |lane| lane / 64 * 32 + lane % 32),
    ];
    for (shape, row_of) in shapes {
        let got = copy_to_tensor_memory(shape, true).unwrap_or_else(|f| panic!("{shape}: {f}"));
        for lane in 0..128 {
            for column in 0..COLUMNS {
                let row = row_of(lane);
                let word = row / 8 * (GROUP / 4) + row % 8 * 4 + column.wrapping_sub(FIRST);
                let is_copied = (FIRST..FIRST + 4).contains(&column);
                let want = if is_copied { 0x1000 + word } else { lane << 16 | column };
                assert_eq!(
                    got[(lane * COLUMNS + column) as usize],
                    want,
                    "{shape}: lane {lane} column {column}"
                );
            }
        }
    }
}

#[test]
fn a_copy_of_rows_is_complete_only_when_its_commit_is_waited_for() {
    for shape in ["128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23"] {
        let fault = copy_to_tensor_memory(shape, false).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Race, "{shape}: {fault}");
    }
}

/// Rows of the matrix in global memory, and words of each.
const ROWS: u32 = 12;
const WORDS: u32 = 32;

/// Brings four rows, from word `column` on, into shared memory. The barrier expects `expected` bytes.
fn gather(form: &str, column: u32, rows: &str, map: &TensorMap, expected: u32) -> Result<Vec<u32>, Fault> {
    let device = Device::new();
    let words: Vec<u32> = (0..ROWS * WORDS).map(|n| ((n / WORDS) << 16) | (n % WORDS)).collect();
    let map = TensorMap { address: upload(&device, &words), ..map.clone() };
    let bytes = map.encode();
    let map = upload_bytes(&device, &bytes);
    let out = device.alloc(512);
    let text = format!(
        ".version 8.6\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 raw[];
        .visible .entry k(.param .u64 m, .param .u64 o) {{
        .reg .pred %p, %q; .reg .b32 %t, %a, %done, %x, %v; .reg .b64 %map, %out, %off;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; mov.u32 %a, raw; add.u32 %done, %a, 1024;
        ld.param.u64 %map, [m];
        @%p mbarrier.init.shared::cta.b64 [%done], 1; @%p fence.mbarrier_init.release.cluster; bar.sync 0;
        @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%done], {expected};
        @%p cp.async.bulk.tensor.{form}.mbarrier::complete_tx::bytes
            [%a], [%map, {{{column}, {rows}}}], [%done];
        W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%done], 0; @!%q bra W;
        shl.b32 %x, %t, 2; add.u32 %x, %x, %a; ld.shared.b32 %v, [%x];
        mul.wide.u32 %off, %t, 4; ld.param.u64 %out, [o]; add.s64 %out, %out, %off; st.global.b32 [%out], %v; ret; }}"
    );
    let args: Vec<u8> = [map, out].iter().flat_map(|x| x.to_le_bytes()).collect();
    run(&device, &text, &block(4 * WORDS, 2048), &args, &checked())?;
    Ok(download(&device, out, 4 * WORDS as usize))
}

/// A matrix of f32 whose box is one row of 32 words.
fn matrix(swizzle: u8, box_rows: u32) -> TensorMap {
    TensorMap {
        data_type: 7,
        rank: 2,
        address: 0,
        dims: [WORDS.into(), ROWS.into(), 1, 1, 1],
        strides: [u64::from(4 * WORDS), 0, 0, 0],
        box_dims: [WORDS, box_rows, 1, 1, 1],
        element_strides: [1; 5],
        interleave: 0,
        swizzle,
        nan_fill: false,
    }
}

const GATHER4: &str = "2d.shared::cta.global.tile::gather4";

/// The first coordinate is the column, the four others are rows. Rows follow each other in shared memory, in the
/// swizzle of the map; what lies outside the matrix is zero.
#[test]
fn four_rows_come_in_the_order_of_their_coordinates() {
    for (swizzle, column, rows) in
        [(0u8, 0u32, [7i32, 2, 11, 2]), (3, 0, [0, 9, 1, 4]), (0, 8, [3, 12, 5, -1])]
    {
        let list = rows.map(|row| row.to_string()).join(", ");
        let got = gather(GATHER4, column, &list, &matrix(swizzle, 1), 512)
            .unwrap_or_else(|f| panic!("{rows:?}: {f}"));
        for (place, row) in rows.into_iter().enumerate() {
            for word in 0..WORDS {
                let from = column + word;
                let there = (0..ROWS as i32).contains(&row) && from < WORDS;
                let want = if there { (row as u32) << 16 | from } else { 0 };
                // Sixteen bytes are exchanged by the row's place.
                let at = if swizzle == 3 { word ^ (place as u32) << 2 } else { word };
                assert_eq!(got[place * 32 + at as usize], want, "{rows:?}, place {place}, word {word}");
            }
        }
    }
}

#[test]
fn a_gather_needs_boxes_of_one_row_five_coordinates_and_two_dimensions() {
    let tall = gather(GATHER4, 0, "1, 2, 3, 4", &matrix(0, 4), 512).unwrap_err();
    assert_eq!(tall.kind, FaultKind::Descriptor, "{tall}");
    assert!(tall.text.contains("box of 4 rows"), "{tall}");
    let few = gather(GATHER4, 0, "1, 2, 3", &matrix(0, 1), 512).unwrap_err();
    assert_eq!(few.kind, FaultKind::Unsupported, "{few}");
    let three =
        gather("3d.shared::cta.global.tile::gather4", 0, "1, 2, 3, 4", &matrix(0, 1), 512).unwrap_err();
    assert_eq!(three.kind, FaultKind::Unsupported, "{three}");
}

/// The barrier counts all four rows: one that expects one row's bytes passes too early or never.
#[test]
fn a_gather_completes_the_bytes_of_four_rows() {
    assert!(gather(GATHER4, 0, "1, 2, 3, 4", &matrix(0, 1), 128).is_err());
}
