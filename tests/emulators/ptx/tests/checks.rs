//! Each planted mistake is reported by its own name, and the sound twin of it is not.

mod common;

use common::{HEADER, block, checked, download, run, upload};
use fmha_emu_ptx::{Asynchrony, Device, Fault, FaultKind, LaunchConfig, Options, Report};

/// Runs `body` with `%t` the thread, `%s` shared memory of 4 KiB, `%g` 128 words of zeros.
fn try_body(body: &str, config: &LaunchConfig, options: &Options) -> Result<Report, Fault> {
    let device = Device::new();
    let data = upload(&device, &[0; 128]);
    let ptx = format!(
        "{HEADER}.visible .entry k(.param .u64 d) {{ .shared .align 128 .b8 mem[4096];
        .reg .pred %p, %q; .reg .b32 %t, %s, %w<8>; .reg .b64 %g, %l, %x<4>;
        mov.u32 %t, %tid.x; mov.u32 %s, mem; ld.param.u64 %g, [d]; mul.wide.u32 %l, %t, 4;
        {body} ret; }}"
    );
    run(&device, &ptx, config, &data.to_le_bytes(), options)
}

fn kind(body: &str, threads: u32, options: &Options) -> Option<FaultKind> {
    try_body(body, &block(threads, 0), options).err().map(|f| f.kind)
}

#[test]
fn a_store_and_a_load_of_two_warps_need_a_barrier() {
    let exchange = |barrier: &str| {
        format!(
            "shl.b32 %w0, %t, 2; add.u32 %w0, %s, %w0; st.shared.b32 [%w0], %t; {barrier}
             xor.b32 %w1, %t, 32; shl.b32 %w1, %w1, 2; add.u32 %w1, %s, %w1; ld.shared.b32 %w2, [%w1];"
        )
    };
    let mut options = checked();
    options.check_uninitialised = false;
    assert_eq!(kind(&exchange(""), 64, &options), Some(FaultKind::Race));
    assert_eq!(kind(&exchange("bar.sync 0;"), 64, &options), None);
}

#[test]
fn generic_writes_need_a_proxy_fence_before_a_bulk_store() {
    let store = |fence: &str| {
        format!(
            "setp.eq.u32 %p, %t, 0; st.shared.b32 [%s], %t; st.shared.b32 [%s+4], %t; st.shared.b32 [%s+8], %t;
             st.shared.b32 [%s+12], %t; {fence}
             @%p cp.async.bulk.global.shared::cta.bulk_group [%g], [%s], 16;
             @%p cp.async.bulk.commit_group; @%p cp.async.bulk.wait_group 0;"
        )
    };
    assert_eq!(kind(&store(""), 1, &checked()), Some(FaultKind::MissingProxyFence));
    assert_eq!(kind(&store("fence.proxy.async.shared::cta;"), 1, &checked()), None);
}

#[test]
fn overwriting_the_source_of_a_bulk_store_needs_its_wait() {
    let store = |wait: &str| {
        format!(
            "st.shared.v4.b32 [%s], {{%t, %t, %t, %t}}; fence.proxy.async.shared::cta;
             cp.async.bulk.global.shared::cta.bulk_group [%g], [%s], 16; cp.async.bulk.commit_group;
             {wait} st.shared.b32 [%s], 5; cp.async.bulk.wait_group 0;"
        )
    };
    assert_eq!(kind(&store(""), 1, &checked()), Some(FaultKind::Race));
    assert_eq!(kind(&store("cp.async.bulk.wait_group.read 0;"), 1, &checked()), None);
}

#[test]
fn a_bulk_store_whose_reading_alone_was_waited_for_writes_later() {
    let device = Device::new();
    let data = upload(&device, &[0; 128]);
    let ptx = |wait: &str| {
        format!(
            "{HEADER}.visible .entry k(.param .u64 d) {{ .shared .align 128 .b8 mem[4096];
             .reg .b32 %s, %w; .reg .b64 %g; mov.u32 %s, mem; ld.param.u64 %g, [d];
             st.shared.v4.b32 [%s], {{7, 7, 7, 7}}; fence.proxy.async.shared::cta;
             cp.async.bulk.global.shared::cta.bulk_group [%g], [%s], 16; cp.async.bulk.commit_group;
             {wait} st.shared.b32 [%s], 5; ld.global.b32 %w, [%g]; st.global.b32 [%g+64], %w; ret; }}"
        )
    };
    let mut late = checked();
    late.asynchrony = Asynchrony::Late { seed: 1 };
    for (wait, seen) in [("cp.async.bulk.wait_group.read 0;", 0), ("cp.async.bulk.wait_group 0;", 7)] {
        device.upload(data, &[0; 128]).unwrap();
        run(&device, &ptx(wait), &block(1, 0), &data.to_le_bytes(), &late).unwrap();
        let words = download(&device, data, 17);
        // The bytes that it wrote in the end are those that it had read, not later ones.
        assert_eq!((words[16], words[0]), (seen, 7), "{wait}");
    }
}

#[test]
fn a_copy_into_shared_memory_needs_its_wait_group() {
    let copy = |wait: &str| {
        format!(
            "cp.async.ca.shared.global [%s], [%g], 16; cp.async.commit_group; {wait} ld.shared.b32 %w0, [%s];"
        )
    };
    assert_eq!(kind(&copy(""), 1, &checked()), Some(FaultKind::Race));
    assert_eq!(kind(&copy("cp.async.wait_group 0;"), 1, &checked()), None);
}

#[test]
fn a_copy_is_there_for_who_sees_the_phase_of_an_mbarrier_that_counts_it() {
    // Warp 0 copies; warp 1 waits and reads.
    let copy = |before: &str, after: &str, wait: &str| {
        format!(
            "setp.lt.u32 %p, %t, 32; setp.eq.u32 %q, %t, 0; add.u32 %w5, %s, 1024; shl.b32 %w0, %t, 4; add.u32 %w0, %s, %w0;
             @%q mbarrier.init.shared::cta.b64 [%w5], 32; bar.sync 0; @!%p bra W;
             {before} cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%w5]; {after} cp.async.wait_all; bra E;
             W: {wait} ld.shared.b32 %w2, [%s]; E:"
        )
    };
    let copies = "cp.async.cg.shared.global [%w0], [%g], 16;";
    let wait = "V: mbarrier.try_wait.parity.shared::cta.b64 %q, [%w5], 0; @!%q bra V;";
    let mut options = checked();
    options.check_uninitialised = false;
    assert_eq!(kind(&copy(copies, "", wait), 64, &options), None);
    assert_eq!(kind(&copy(copies, "", ""), 64, &options), Some(FaultKind::Race));
    // One that is issued after the arrival is not counted, whatever group it is of.
    assert_eq!(kind(&copy("", copies, wait), 64, &options), Some(FaultKind::Race));
    let twice = format!("{copies} cp.async.commit_group;");
    assert_eq!(kind(&copy(&twice, "", wait), 64, &options), None);
    assert_eq!(kind(&copy(&twice, copies, wait), 64, &options), Some(FaultKind::Race));
    // An arrival ends no group: of two groups one is still under way.
    let group = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%w6]; cp.async.cg.shared.global [%w0], [%g], 16; cp.async.commit_group;";
    let left = |pending: u32| {
        format!(
            "add.u32 %w6, %s, 1024; shl.b32 %w0, %t, 4; add.u32 %w0, %s, %w0; setp.eq.u32 %q, %t, 0;
             @%q mbarrier.init.shared::cta.b64 [%w6], 64; bar.sync 0;
             {group} cp.async.commit_group; cp.async.wait_group {pending}; ld.shared.b32 %w2, [%w0];"
        )
    };
    assert_eq!(kind(&left(1), 32, &options), None);
    assert_eq!(kind(&left(2), 32, &options), Some(FaultKind::Race));
}

#[test]
fn an_mbarrier_orders_what_was_before_the_arrival() {
    let pass = |wait: &str| {
        format!(
            "setp.eq.u32 %p, %t, 0; add.u32 %w5, %s, 1024;
             @%p mbarrier.init.shared::cta.b64 [%w5], 1; bar.sync 0;
             @%p st.shared.b32 [%s], 7; @%p mbarrier.arrive.shared::cta.b64 _, [%w5];
             {wait} ld.shared.b32 %w2, [%s];"
        )
    };
    let mut options = checked();
    options.check_uninitialised = false;
    let wait = "W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%w5], 0; @!%q bra W;";
    assert_eq!(kind(&pass(""), 64, &options), Some(FaultKind::Race));
    assert_eq!(kind(&pass(wait), 64, &options), None);
}

#[test]
fn a_phase_that_never_completes_is_a_deadlock_with_every_place() {
    let body = "setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared::cta.b64 [%s], 2; bar.sync 0;
        @%p mbarrier.arrive.shared::cta.b64 _, [%s];
        W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%s], 0; @!%q bra W;";
    let fault = try_body(body, &block(64, 0), &Options::default()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Deadlock);
    assert!(fault.text.contains("warp 0") && fault.text.contains("warp 1"), "{fault}");
}

#[test]
fn lanes_that_spin_do_not_keep_the_other_lanes_of_their_warp_out() {
    // One lane waits for a word that another lane of its warp is to write.
    let flag = "setp.ne.u32 %p, %t, 0; @%p bra SET;
        L: ld.volatile.shared.b32 %w0, [%s]; setp.eq.u32 %q, %w0, 0; @%q bra L; bra E;
        SET: st.volatile.shared.b32 [%s], 1; E: bar.warp.sync -1;";
    let mut options = Options::default();
    options.check_uninitialised = false;
    assert_eq!(kind(flag, 32, &options), None);
    // One lane waits for a phase that never comes, the others for that lane: an end all the same.
    let phase = "setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared::cta.b64 [%s], 2; @!%p bra E;
        W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%s], 0; @!%q bra W;
        E: bar.warp.sync -1;";
    assert_eq!(kind(phase, 32, &options), Some(FaultKind::Deadlock));
}

#[test]
fn a_loop_that_changes_something_each_time_ends_at_the_limit_of_instructions() {
    let mut options = Options::default();
    options.instruction_limit = 100_000;
    let count = "L: atom.global.add.u32 %w0, [%g], 1; setp.lt.u32 %p, %w0, 100000; @%p bra L;";
    assert_eq!(kind(count, 32, &options), None);
    options.instruction_limit = 1000;
    assert_eq!(kind(count, 32, &options), Some(FaultKind::Livelock));
}

#[test]
fn a_loop_that_changes_nothing_is_a_livelock() {
    let mut options = Options::default();
    options.spin_limit = 100_000;
    assert_eq!(
        kind("L: ld.volatile.global.b32 %w0, [%g]; setp.eq.u32 %p, %w0, 0; @%p bra L;", 32, &options),
        Some(FaultKind::Livelock)
    );
}

#[test]
fn over_reads_misalignment_and_unwritten_bytes_have_their_own_names() {
    let options = Options::default();
    assert_eq!(kind("ld.global.b32 %w0, [%g+512];", 1, &options), Some(FaultKind::OutOfBounds));
    assert_eq!(kind("ld.global.b32 %w0, [%g-4];", 1, &options), Some(FaultKind::OutOfBounds));
    assert_eq!(kind("ld.global.b32 %w0, [%g+508];", 1, &options), None);
    assert_eq!(kind("ld.global.b32 %w0, [%g+2];", 1, &options), Some(FaultKind::Misaligned));
    assert_eq!(kind("ld.global.v4.b32 {%w0,%w1,%w2,%w3}, [%g+8];", 1, &options), Some(FaultKind::Misaligned));
    assert_eq!(kind("ld.shared.b32 %w0, [%s+8];", 1, &options), Some(FaultKind::Uninitialised));
    assert_eq!(kind("ld.shared.b32 %w0, [%s+4096];", 1, &options), Some(FaultKind::OutOfBounds));
    assert_eq!(kind("ld.shared.b32 %w0, [16];", 1, &options), Some(FaultKind::OutOfBounds));
}

#[test]
fn collectives_without_all_their_lanes_are_named() {
    let options = Options::default();
    let some = "setp.lt.u32 %p, %t, 16; @%p bra S; bra E;
        S: shfl.sync.idx.b32 %w0, %t, 0, 31, -1; bra F; E: bar.sync 0; F: bar.sync 1;";
    assert_eq!(kind(some, 32, &options), Some(FaultKind::DivergentCollective));
    assert_eq!(
        kind("setp.lt.u32 %p, %t, 16; @%p shfl.sync.idx.b32 %w0, %t, 0, 31, -1;", 32, &options),
        Some(FaultKind::DivergentCollective)
    );
}

#[test]
fn a_register_budget_beyond_the_file_is_refused_or_waits() {
    let options = Options::default();
    assert_eq!(kind("setmaxnreg.inc.sync.aligned.u32 257;", 128, &options), Some(FaultKind::RegisterBudget));
    // 384 threads start with 168 each; without a decrease the increase can never be granted.
    assert_eq!(kind("setmaxnreg.inc.sync.aligned.u32 240;", 384, &options), Some(FaultKind::Deadlock));
    let balanced = "setp.lt.u32 %p, %t, 128; @%p bra P; setmaxnreg.inc.sync.aligned.u32 240; bra E;
        P: setmaxnreg.dec.sync.aligned.u32 24; E:";
    assert_eq!(kind(balanced, 384, &options), None);
    // 96 and twice 208 fit the register file, but not three times 168: an H200 waits for ever. 88 and twice 208 do.
    let three = |loads: u32| {
        format!(
            "setp.lt.u32 %p, %t, 128; @%p bra P; setmaxnreg.inc.sync.aligned.u32 208; bra E;
            P: setmaxnreg.dec.sync.aligned.u32 {loads}; bar.sync 1, 128; E: bar.sync 0;"
        )
    };
    assert_eq!(kind(&three(96), 384, &options), Some(FaultKind::Deadlock));
    assert_eq!(kind(&three(88), 384, &options), None);
}

#[test]
fn bank_conflicts_are_counted_and_broadcasts_are_not() {
    let conflicts = |shift: u32| {
        let body = format!(
            "shl.b32 %w0, %t, {shift}; and.b32 %w0, %w0, 4095; add.u32 %w0, %s, %w0; st.shared.b32 [%w0], %t;"
        );
        try_body(&body, &block(32, 0), &Options::default()).unwrap().counters.bank_conflicts
    };
    assert_eq!(conflicts(2), 0);
    assert_eq!(conflicts(3), 1);
    assert_eq!(conflicts(7), 31);
    assert_eq!(conflicts(31), 0);
}

/// A copy of 16 bytes a lane is four wavefronts of eight lanes.
#[test]
fn bank_conflicts_of_asynchronous_copies_are_counted() {
    let conflicts = |shift: u32| {
        let body = format!(
            "shl.b32 %w0, %t, {shift}; and.b32 %w0, %w0, 4095; add.u32 %w0, %s, %w0; \
             cp.async.cg.shared.global [%w0], [%g], 16; cp.async.wait_all;"
        );
        try_body(&body, &block(32, 0), &Options::default()).unwrap().counters.bank_conflicts
    };
    assert_eq!(conflicts(4), 0);
    assert_eq!(conflicts(5), 4);
    assert_eq!(conflicts(7), 4 * 7);
}

#[test]
fn an_unknown_instruction_is_an_error_with_its_line() {
    let fault = try_body(
        "\nwgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 %w0;",
        &block(32, 0),
        &Options::default(),
    )
    .unwrap_err();
    assert_eq!(fault.kind, FaultKind::Unsupported);
    assert_eq!(fault.line, 8);
}

#[test]
fn a_cluster_exchanges_through_distributed_shared_memory() {
    let config = LaunchConfig {
        grid: [2, 1, 1],
        block: [32, 1, 1],
        cluster: [2, 1, 1],
        dynamic_shared: 0,
        dependent: false,
    };
    let body = "mov.u32 %w0, %cluster_ctarank; st.shared.b32 [%s], %w0;
        barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
        xor.b32 %w1, %w0, 1; mapa.shared::cluster.u32 %w2, %s, %w1; ld.shared::cluster.b32 %w3, [%w2];
        setp.ne.u32 %p, %w3, %w1; @%p trap;
        barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";
    let one_lane = body.replace("st.shared.b32", "setp.eq.u32 %q, %t, 0; @%q st.shared.b32");
    assert!(try_body(&one_lane, &config, &checked()).is_ok());
    let racing = one_lane
        .replacen("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "", 1)
        .replace("@%p trap;", "");
    let mut options = checked();
    options.check_uninitialised = false;
    assert_eq!(try_body(&racing, &config, &options).unwrap_err().kind, FaultKind::Race);
}

#[test]
fn the_last_lane_of_a_warp_counts_for_the_whole_warp_at_a_barrier() {
    let body =
        "setp.ne.u32 %p, %t, 0; setp.ne.u32 %q, %t, 32; and.pred %p, %p, %q; @%p exit; barrier.sync 7, 64;";
    assert_eq!(kind(body, 64, &checked()), None);
}

#[test]
fn a_grid_that_need_not_wait_for_those_before_it_touches_no_memory_before_it_has_waited() {
    const COPY: &str =
        "cp.async.bulk.global.shared::cta.bulk_group [%g], [%s], 16; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;";
    let kind = |body: &str, dependent: bool| {
        let config = LaunchConfig { dependent, ..block(1, 0) };
        let body =
            format!("st.shared.v4.b32 [%s], {{%t, %t, %t, %t}}; fence.proxy.async.shared::cta; {body}");
        try_body(&body, &config, &checked()).err().map(|fault| fault.kind)
    };
    for access in
        ["ld.global.b32 %w0, [%g];", "st.global.b32 [%g], 1;", "atom.global.add.u32 %w0, [%g], 1;", COPY]
    {
        assert_eq!(kind(access, true), Some(FaultKind::MissingGridWait), "{access}");
        assert_eq!(kind(access, false), None, "{access}");
        assert_eq!(
            kind(&format!("griddepcontrol.launch_dependents; griddepcontrol.wait; {access}"), true),
            None
        );
    }
}

#[test]
fn an_instruction_without_its_operands_is_an_error_and_no_panic() {
    let device = Device::new();
    let load = |body: &str| device.load(&format!("{HEADER}.visible .entry k() {{ {body} ret; }}"));
    for opcode in [
        "add.u32",
        "mad.lo.u32",
        "lop3.b32",
        "not.pred",
        "selp.b32",
        "setp.eq.u32",
        "slct.b32.s32",
        "cvt.u32.f32",
        "cvt.rn.bf16x2.f32",
        "cvt.pack.sat.s8.s32.b32",
        "dp4a.u32.u32",
        "mov.b32",
        "ld.global.b32",
        "st.shared.v4.b32",
        "atom.global.cas.b32",
        "red.global.add.u32",
        "cvta.to.global.u64",
        "isspacep.shared",
        "mapa.shared::cluster.u32",
        "getctarank.u64",
        "cp.async.cg.shared.global",
        "cp.async.wait_group",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        "cp.async.bulk.wait_group",
        "tensormap.replace.tile.global_address.global.b1024.b64",
        "shfl.sync.idx.b32",
        "vote.sync.any.pred",
        "match.any.sync.b32",
        "elect.sync",
        "redux.sync.add.u32",
        "activemask.b32",
        "bar.sync",
        "bar.red.popc.u32",
        "barrier.sync",
        "setmaxnreg.inc.sync.aligned.u32",
        "mbarrier.init.shared.b64",
        "mbarrier.try_wait.parity.shared::cta.b64",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16",
        "movmatrix.sync.aligned.m8n8.trans.b16",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
        "wgmma.wait_group.sync.aligned",
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32",
        "tcgen05.ld.sync.aligned.32x32b.x1.b32",
        "tcgen05.st.sync.aligned.32x32b.x1.b32",
        "tcgen05.cp.cta_group::1.128x256b",
        "tcgen05.mma.cta_group::1.kind::f16",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64",
        "tcgen05.shift.cta_group::1.down",
    ] {
        assert!(load(&format!("{opcode};")).is_err(), "{opcode}");
        let first = opcode.split('.').next().unwrap();
        assert!(load(&format!("{first};")).is_err(), "{first}");
        // Right for some.
        drop(load(&format!("{opcode} 0;")));
    }
}

#[test]
fn a_launch_beyond_all_counting_is_refused() {
    for config in [
        LaunchConfig { grid: [u32::MAX; 3], ..block(32, 0) },
        LaunchConfig { cluster: [1 << 16; 3], grid: [1 << 16; 3], ..block(32, 0) },
        block(u32::MAX, 0),
        LaunchConfig { block: [1 << 16, 1 << 16, 1], ..block(32, 0) },
    ] {
        assert_eq!(try_body("", &config, &checked()).unwrap_err().kind, FaultKind::Launch, "{config:?}");
    }
}

#[test]
fn halves_of_a_word_have_races_of_their_own() {
    // Warp 0 reads (or writes) the low half, then the high half; warp 1 writes the low half, unordered.
    let body = |first: &str, second: &str, barrier: &str| {
        format!(
            ".reg .b16 %h; mov.b16 %h, 0; setp.eq.u32 %p, %t, 0; setp.eq.u32 %q, %t, 32; @%p st.shared.b32 [%s], 0;
             bar.sync 0; @%p {first}; @%p {second}; {barrier} @%q st.shared.b16 [%s], %h;"
        )
    };
    let (low, high) = ("ld.shared.b16 %h, [%s]", "ld.shared.b16 %h, [%s+2]");
    let (low_st, high_st) = ("st.shared.b16 [%s], %h", "st.shared.b16 [%s+2], %h");
    for (first, second) in [(low, high), (low, high_st), (low_st, high_st), (low_st, high)] {
        assert_eq!(
            kind(&body(first, second, ""), 64, &checked()),
            Some(FaultKind::Race),
            "{first}; {second}"
        );
        assert_eq!(kind(&body(first, second, "bar.sync 0;"), 64, &checked()), None, "{first}; {second}");
    }
    for high in [high, high_st] {
        assert_eq!(kind(&body(high, high, ""), 64, &checked()), None, "{high}");
    }
}

#[test]
fn a_copy_that_nobody_has_waited_for_is_named_when_its_cta_ends() {
    let copy = |wait: &str| {
        format!(
            "mbarrier.init.shared::cta.b64 [%s+1024], 1; fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;
             mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s+1024], 256;
             cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%s], [%g], 256, [%s+1024];
             {wait}"
        )
    };
    let found = try_body(&copy(""), &block(1, 0), &checked()).unwrap_err();
    assert_eq!(found.kind, FaultKind::Barrier, "{found}");
    assert!(found.text.contains("no thread has waited for"), "{found}");
    let wait = "W: mbarrier.try_wait.parity.shared::cta.b64 %p, [%s+1024], 0; @!%p bra W;";
    assert_eq!(kind(&copy(wait), 1, &checked()), None);
}

#[test]
fn one_word_amid_a_copy_races_for_itself() {
    // Warp 1 reads one word; the copy of warp 0 overwrites it and its neighbours, which saw nothing or the
    // same warp's reads.
    let copy = |word: u32, others: &str, barrier: &str| {
        format!(
            "setp.eq.u32 %p, %t, 0; setp.eq.u32 %q, %t, 32; shl.b32 %w0, %t, 2; add.u32 %w0, %s, %w0;
             st.shared.b32 [%w0], 0; st.shared.b32 [%w0+256], 0; @%p mbarrier.init.shared::cta.b64 [%s+1024], 1;
             @%p fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; bar.sync 0;
             {others} @%q ld.shared.b32 %w1, [%s+{word}]; {barrier}
             @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s+1024], 256;
             @%p cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%s], [%g], 256, [%s+1024];
             W: mbarrier.try_wait.parity.shared::cta.b64 %p, [%s+1024], 0; @!%p bra W;"
        )
    };
    let reads = "@%p ld.shared.b32 %w1, [%s]; @%p ld.shared.v4.b32 {%w1,%w2,%w3,%w4}, [%s+128];";
    for others in ["", reads] {
        for word in [0, 64, 132, 252] {
            let found = try_body(&copy(word, others, ""), &block(64, 0), &checked()).unwrap_err();
            assert_eq!(found.kind, FaultKind::Race, "{word}: {found}");
            assert!(found.text.contains(&format!("shared memory {:#x} ", 1024 + word)), "{word}: {found}");
            assert_eq!(kind(&copy(word, others, "bar.sync 0;"), 64, &checked()), None, "{word}");
        }
        assert_eq!(kind(&copy(256, others, ""), 64, &checked()), None, "behind the copy");
    }
}
