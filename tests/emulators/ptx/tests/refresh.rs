//! `tcgen05.cp.4x256b`: four rows of eight words to one lane of each warp's part of tensor memory.

#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

mod common;

use common::{block, checked, download, run};
use fmha_emu_ptx::{Device, Fault, FaultKind};

/// Word `n` of shared memory.
fn word(n: u32) -> u32 {
    0x1000 + n
}

/// Every lane's eight columns are set to `lane << 16 | column`; then the copy goes to `lane`. `swizzled`: the
/// rows are 128 bytes apart and exchanged; else each row is two sixteen-byte parts, 256 bytes apart, the next
/// row beside the first.
fn kernel(lane: u32, swizzled: bool, wait: bool) -> String {
    // Words of the descriptor: leading distance 256 bytes, or the swizzle over 128 bytes.
    let desc: u64 = if swizzled { 2 << 61 | 1 << 46 | 1 << 16 } else { 1 << 46 | (256 >> 4) << 16 };
    let lines: String = (0..8)
        .map(|c| format!("shl.b32 %v{c}, %t, 16; or.b32 %v{c}, %v{c}, {c};"))
        .chain((0..2).map(|i| {
            format!("add.u32 %x, %t, {}; shl.b32 %y, %x, 2; add.u32 %y, %y, %a; add.u32 %x, %x, 0x1000; st.shared.b32 [%y], %x;", i * 128)
        }))
        .collect();
    let stores: String = (0..8).map(|c| format!("st.global.b32 [%out+{}], %v{c};", 4 * c)).collect();
    let regs = (0..8).map(|i| format!("%v{i}")).collect::<Vec<_>>().join(",");
    let wait =
        if wait { "W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%done], 0; @!%q bra W;" } else { "" };
    format!(
        ".version 8.6\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 raw[];
        .visible .entry k(.param .u64 o) {{
        .reg .pred %p, %q, %w; .reg .b32 %t, %a, %x, %y, %done, %slot, %tm, %tl, %v<8>; .reg .b64 %d, %out, %off;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; setp.lt.u32 %w, %t, 32;
        mov.u32 %a, raw; add.u32 %done, %a, 1024; add.u32 %slot, %done, 8;
        @%p mbarrier.init.shared::cta.b64 [%done], 1; @%p fence.mbarrier_init.release.cluster;
        @!%w bra A1; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 32; A1:
        {lines}
        fence.proxy.async.shared::cta;
        tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
        ld.shared.b32 %tm, [%slot]; shr.u32 %tl, %t, 5; shl.b32 %tl, %tl, 21; add.u32 %tl, %tm, %tl;
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%tl], {{{regs}}}; tcgen05.wait::st.sync.aligned;
        tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
        shr.u32 %x, %a, 4; cvt.u64.u32 %d, %x; or.b64 %d, %d, {desc};
        @%p tcgen05.cp.cta_group::1.4x256b [%tm+{}], %d;
        @%p tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%done];
        {wait}
        tcgen05.fence::after_thread_sync;
        tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{regs}}}, [%tl]; tcgen05.wait::ld.sync.aligned;
        mul.wide.u32 %off, %t, 32; ld.param.u64 %out, [o]; add.s64 %out, %out, %off; {stores}
        tcgen05.fence::before_thread_sync; bar.sync 0;
        @!%w bra D1; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 32; D1: ret; }}",
        lane << 16
    )
}

/// Words that the 128 lanes hold in the end, eight each.
fn refresh(lane: u32, swizzled: bool, wait: bool) -> Result<Vec<u32>, Fault> {
    let device = Device::new();
    let out = device.alloc(128 * 32);
    let text = kernel(lane, swizzled, wait);
    run(&device, &text, &block(128, 2048), &out.to_le_bytes(), &checked())?;
    Ok(download(&device, out, 128 * 8))
}

#[test]
fn a_row_goes_to_the_same_lane_of_each_warps_part_and_nothing_else_changes() {
    for (lane, swizzled) in [(31, false), (31, true), (0, true), (7, false)] {
        let got = refresh(lane, swizzled, true).unwrap_or_else(|f| panic!("lane {lane}: {f}"));
        for t in 0..128 {
            for c in 0..8 {
                let (row, part) = (t / 32, c / 4);
                let want = match (t % 32 == lane, swizzled) {
                    (false, _) => t << 16 | c,
                    // The row's number is in the swizzle: part 0 and 1 are exchanged with part `row`.
                    (true, true) => word(row * 32 + (part ^ row) * 4 + c % 4),
                    (true, false) => word(row * 4 + part * 64 + c % 4),
                };
                assert_eq!(got[(t * 8 + c) as usize], want, "to lane {lane}: lane {t} column {c}");
            }
        }
    }
}

#[test]
fn a_refresh_is_complete_only_when_its_commit_is_waited_for() {
    let fault = refresh(31, true, false).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Race, "{fault}");
}

#[test]
fn a_refresh_begins_in_the_first_warps_part() {
    let fault = refresh(32, true, true).unwrap_err();
    assert_eq!(fault.kind, FaultKind::TensorMemory, "{fault}");
    assert!(fault.text.contains("from lane 32"), "{fault}");
}
