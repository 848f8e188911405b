//! Faults that a kernel's author makes, each reported by its own name; the sound twin of each is not reported.
//!
//! A descriptor with the wrong swizzle is in `wgmma.rs`, tensor memory read from the wrong warp in `tcgen05.rs`.
#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

mod common;

use common::{HEADER, block, checked, run, upload_bytes};
use fmha_emu_ptx::{Device, Fault, FaultKind, Options, Report, TensorMap};

/// A tile of 64 rows of 128 bytes, stored by rows and read by columns of 16 bytes, as an epilogue does.
fn transposed_tile(swizzled: bool) -> Report {
    let device = Device::new();
    let swizzle = if swizzled { "and.b32 %w, %t, 7; shl.b32 %w, %w, 4; xor.b32 %a, %a, %w;" } else { "" };
    let ptx = format!(
        "{HEADER}.visible .entry k() {{ .shared .align 128 .b8 mem[4096];
        .reg .b32 %t, %a, %s, %w, %v<4>;
        mov.u32 %t, %tid.x; mov.u32 %s, mem; shl.b32 %a, %t, 7; {swizzle} add.u32 %a, %a, %s;
        st.shared.v4.b32 [%a], {{%t, %t, %t, %t}}; bar.warp.sync -1;
        ld.shared.v4.b32 {{%v0, %v1, %v2, %v3}}, [%a]; ret; }}"
    );
    run(&device, &ptx, &block(32, 0), &[], &checked()).unwrap()
}

#[test]
fn rows_a_bank_cycle_apart_conflict_and_a_swizzle_parts_them() {
    // Eight lanes move 128 bytes in a pass; a row is 128 bytes long, so without a swizzle all eight want one bank.
    let planted = transposed_tile(false).counters;
    assert_eq!((planted.shared_passes, planted.bank_conflicts), (2 * 32, 2 * 28));
    let sound = transposed_tile(true).counters;
    assert_eq!((sound.shared_passes, sound.bank_conflicts), (2 * 4, 0));
    assert_eq!(planted.shared_bytes, sound.shared_bytes);
}

/// A tile of 64 rows from row `first` on of a tensor that has memory for 64 rows, and whose map says `rows`.
fn tile(rows: u64, first: u32, inner: u32, options: &Options) -> Result<Report, Fault> {
    tile_from((0, first), rows, inner, options)
}

/// Copy of a tile from element `column` of its rows on.
fn tile_from((column, first): (u32, u32), rows: u64, inner: u32, options: &Options) -> Result<Report, Fault> {
    let device = Device::new();
    let data = upload_bytes(&device, &[1; 64 * 256]);
    let map = TensorMap {
        data_type: 9,
        rank: 2,
        address: data,
        dims: [128, rows, 1, 1, 1],
        strides: [256, 0, 0, 0],
        box_dims: [inner, 64, 1, 1, 1],
        element_strides: [1; 5],
        interleave: 0,
        swizzle: 3,
        nan_fill: false,
    };
    let ptx = format!(
        "{HEADER}.extern .shared .align 1024 .b8 raw[];
        .visible .entry k(.param .align 64 .b8 map[128]) {{
        .reg .pred %p, %q; .reg .b32 %t, %a, %bar;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; mov.u32 %a, raw; add.u32 %bar, %a, 32768;
        @%p mbarrier.init.shared::cta.b64 [%bar], 1; @%p fence.mbarrier_init.release.cluster; bar.sync 0;
        @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {};
        @%p cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%a], [map, {{{column}, {first}}}], [%bar];
        W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%bar], 0; @!%q bra W; ret; }}",
        inner * 64 * 2
    );
    run(&device, &ptx, &block(32, 40960), &map.encode(), options)
}

#[test]
fn an_inner_box_wider_than_the_swizzle_span_is_a_bad_descriptor() {
    let fault = tile(64, 0, 128, &checked()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Descriptor, "{fault}");
    assert!(
        fault.text.contains("inner box of 256 bytes is wider than the swizzle span of 128 bytes"),
        "{fault}"
    );
    assert!(tile(64, 0, 64, &checked()).is_ok());
}

#[test]
fn a_tile_that_begins_between_16_bytes_of_a_row_is_misaligned() {
    for options in [Options::default(), checked()] {
        assert!(tile_from((8, 0), 64, 64, &options).is_ok());
        for column in [1, 4, 15] {
            let fault = tile_from((column, 0), 64, 64, &options).unwrap_err();
            assert_eq!(fault.kind, FaultKind::Misaligned, "{fault}");
            assert!(fault.text.contains(&format!("begins {} bytes into a row", 2 * column)), "{fault}");
        }
    }
}

#[test]
fn a_tile_that_reads_one_row_too_many_is_out_of_bounds() {
    // The map says 65 rows where memory has 64: the tile that begins at row 1 ends in the guard.
    for options in [Options::default(), checked()] {
        let fault = tile(65, 1, 64, &options).unwrap_err();
        assert_eq!(fault.kind, FaultKind::OutOfBounds, "{fault}");
        assert!(fault.text.contains("past the end of the 16384 bytes"), "{fault}");
        // A sound map fills the last row of this tile with zeros.
        assert!(tile(64, 1, 64, &options).is_ok());
    }
}

#[test]
fn a_barrier_that_the_copy_engine_cannot_see_yet_is_named() {
    let device = Device::new();
    let data = upload_bytes(&device, &[1; 256]);
    let copy = |fence: &str| {
        format!(
            "{HEADER}.visible .entry k(.param .u64 d) {{ .shared .align 128 .b8 mem[512];
            .reg .pred %q; .reg .b32 %a, %bar; .reg .b64 %g;
            ld.param.u64 %g, [d]; mov.u32 %a, mem; add.u32 %bar, %a, 256;
            mbarrier.init.shared::cta.b64 [%bar], 1; {fence}
            mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 256;
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a], [%g], 256, [%bar];
            W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%bar], 0; @!%q bra W; ret; }}"
        )
    };
    let ran = |fence: &str| run(&device, &copy(fence), &block(1, 0), &data.to_le_bytes(), &checked());
    assert_eq!(ran("").unwrap_err().kind, FaultKind::MissingProxyFence);
    assert!(ran("fence.mbarrier_init.release.cluster;").is_ok());
    assert!(ran("fence.proxy.async.shared::cta;").is_ok());
}

#[test]
fn an_arrival_at_a_named_barrier_that_nobody_waits_for_is_named() {
    let pass = |waits: &str| {
        format!(
            "{HEADER}.visible .entry k() {{ .reg .pred %p; .reg .b32 %t;
            mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 32; @%p bra P;
            {waits} bra E; P: bar.arrive 1, 64; bar.sync 2, 64; bar.arrive 1, 64; E: ret; }}"
        )
    };
    let ran = |waits: &str| run(&Device::new(), &pass(waits), &block(64, 0), &[], &checked());
    assert!(ran("bar.sync 1, 64; bar.arrive 2, 64; bar.sync 1, 64;").is_ok());
    let fault = ran("bar.arrive 2, 64;").unwrap_err();
    assert_eq!(fault.kind, FaultKind::Barrier, "{fault}");
    assert!(fault.text.contains("arrives twice in one phase"), "{fault}");
}

/// Two warpgroups multiply by one tile that a bulk copy brings. The first waits for it if `first_waits`, then
/// arrives at barrier 1; the second runs `second` before it reads.
fn two_readers(first_waits: bool, second: &str) -> Option<FaultKind> {
    let device = Device::new();
    let data = upload_bytes(&device, &[0; 2048]);
    let wait = "W{n}: mbarrier.try_wait.parity.shared::cta.b64 %q, [%bar], 0; @!%q bra W{n};";
    let product = "wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %da, %db, 0, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;";
    let first = if first_waits { wait.replace("{n}", "1") } else { String::new() };
    let second = second.replace("WAIT", &wait.replace("{n}", "2")).replace("PRODUCT", product);
    let ptx = format!(
        "{HEADER}.extern .shared .align 1024 .b8 raw[];
        .visible .entry k(.param .u64 d) {{ .reg .pred %p, %q; .reg .b32 %t, %a, %bar; .reg .f32 %f<4>;
        .reg .b64 %g, %da, %db;
        ld.param.u64 %g, [d]; mov.u32 %t, %tid.x; mov.u32 %a, raw; add.u32 %bar, %a, 2048;
        shr.u32 %a, %a, 4; cvt.u64.u32 %da, %a; or.b64 %da, %da, 0x1000080000; mov.b64 %db, %da; mov.u32 %a, raw;
        setp.eq.u32 %p, %t, 0;
        @%p mbarrier.init.shared::cta.b64 [%bar], 1; @%p fence.mbarrier_init.release.cluster; bar.sync 0;
        @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 2048;
        @%p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a], [%g], 2048, [%bar];
        setp.ge.u32 %p, %t, 128; @%p bra SECOND;
        {first} bar.arrive 1, 256; {product} ret;
        SECOND: {second} {product} ret; }}"
    );
    // Whether the bytes have come by then is luck; the report is to need none.
    let mut options = checked();
    options.check_uninitialised = false;
    run(&device, &ptx, &block(256, 3072), &data.to_le_bytes(), &options).err().map(|fault| fault.kind)
}

#[test]
fn a_turn_taken_from_a_warpgroup_that_has_waited_stands_for_the_wait_and_nothing_else_does() {
    assert_eq!(two_readers(true, "bar.sync 1, 256; WAIT"), None);
    // Barriers are cumulative: what the first warpgroup has seen complete, the second sees behind bar.sync.
    assert_eq!(two_readers(true, "bar.sync 1, 256;"), None);
    // The first warpgroup arrives at barrier 1 without having waited for the copy.
    assert_eq!(two_readers(false, "bar.sync 1, 256;"), Some(FaultKind::Race));
    // The first warpgroup has waited, but the second reads before bar.sync.
    assert_eq!(two_readers(true, "PRODUCT bar.sync 1, 256;"), Some(FaultKind::Race));
}
