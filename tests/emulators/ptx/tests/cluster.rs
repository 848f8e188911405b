//! Addresses of a cluster's shared memory, as an H200 has them: a block's rank stands from bit 24 up in the
//! addresses of its own variables too.
#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

mod common;

use common::{HEADER, download, run, upload};
use fmha_emu_ptx::{Device, FaultKind, LaunchConfig, Options};

/// Runs `body` in one lane of each of two blocks: `%s` is the address of `mem`, `%r` the rank; the word `%d` of each.
/// The blocks end together.
fn two_blocks(body: &str) -> Result<Vec<u32>, FaultKind> {
    two_blocks_apart(&format!("{body} {MEET}"), &Options::default())
}

fn two_blocks_apart(body: &str, options: &Options) -> Result<Vec<u32>, FaultKind> {
    let device = Device::new();
    let out = upload(&device, &[0; 2]);
    let ptx = format!(
        "{HEADER}.visible .entry k(.param .u64 o) {{ .shared .align 128 .b8 mem[4096];
        .reg .pred %p, %q; .reg .b32 %s, %r, %d, %w<8>; .reg .b64 %g, %l, %x<8>;
        mov.u32 %s, mem; mov.u32 %r, %cluster_ctarank; mov.u32 %d, 0;
        {body}
        ld.param.u64 %g, [o]; mul.wide.u32 %l, %r, 4; add.s64 %g, %g, %l; st.global.b32 [%g], %d; ret; }}"
    );
    let config = LaunchConfig {
        grid: [2, 1, 1],
        block: [1, 1, 1],
        cluster: [2, 1, 1],
        dynamic_shared: 0,
        dependent: false,
    };
    run(&device, &ptx, &config, &out.to_le_bytes(), options).map_err(|fault| fault.kind)?;
    Ok(download(&device, out, 2))
}

const MEET: &str = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";

#[test]
fn a_blocks_own_addresses_have_its_rank_above_bit_24() {
    assert_eq!(two_blocks("shr.u32 %d, %s, 24;"), Ok(vec![0, 1]));
    // Through generic space and back, and as mapa gives it for the own rank.
    let generic =
        "mov.u64 %x0, mem; cvta.shared.u64 %x1, %x0; cvta.to.shared.u64 %x2, %x1; cvt.u32.u64 %w0, %x2;
        mapa.shared::cluster.u32 %w1, %s, %r; sub.u32 %d, %w0, %s; sub.u32 %w1, %w1, %s; or.b32 %d, %d, %w1;";
    assert_eq!(two_blocks(generic), Ok(vec![0, 0]));
    assert_eq!(two_blocks("getctarank.shared::cluster.u32 %d, %s;"), Ok(vec![0, 1]));
}

#[test]
fn an_address_without_a_rank_is_block_0s_to_the_cluster_and_the_own_blocks_to_itself() {
    let body = |load: &str| {
        format!(
            "add.u32 %w0, %r, 70; st.shared.b32 [%s], %w0; {MEET} and.b32 %w1, %s, 0xffffff; {load} {MEET}"
        )
    };
    assert_eq!(two_blocks(&body("ld.shared::cluster.b32 %d, [%w1];")), Ok(vec![70, 70]));
    assert_eq!(two_blocks(&body("ld.shared::cta.b32 %d, [%w1];")), Ok(vec![70, 71]));
    assert_eq!(two_blocks(&body("ld.shared::cta.b32 %d, [%s];")), Ok(vec![70, 71]));
    // Another block's address is none of shared::cta.
    let other = body("xor.b32 %w2, %s, 0x1000000; ld.shared::cta.b32 %d, [%w2];");
    assert_eq!(two_blocks(&other), Err(FaultKind::OutOfBounds));
}

#[test]
fn an_arrival_at_an_address_without_a_rank_is_block_0s() {
    // Both blocks arrive at block 0's barrier, which waits for two.
    let body = format!(
        "mbarrier.init.shared::cta.b64 [%s], 2; fence.mbarrier_init.release.cluster; {MEET}
         and.b32 %w1, %s, 0xffffff; mbarrier.arrive.shared::cluster.b64 _, [%w1]; {MEET}
         mbarrier.test_wait.parity.shared::cta.b64 %p, [%s], 0; selp.b32 %d, 1, 0, %p;"
    );
    assert_eq!(two_blocks(&body), Ok(vec![1, 0]));
}

#[test]
fn a_block_that_ends_before_others_are_done_with_its_shared_memory_is_a_race() {
    let mut options = Options::default();
    options.happens_before = true;
    let peer = format!(
        "mbarrier.init.shared::cta.b64 [%s], 2; fence.mbarrier_init.release.cluster; st.shared.b32 [%s+8], 5; {MEET}
         xor.b32 %w0, %s, 0x1000000;"
    );
    for access in ["mbarrier.arrive.shared::cluster.b64 _, [%w0];", "ld.shared::cluster.b32 %w1, [%w0+8];"] {
        assert_eq!(
            two_blocks_apart(&format!("{peer} {access} {MEET}"), &options),
            Ok(vec![0, 0]),
            "{access}"
        );
        assert_eq!(two_blocks_apart(&format!("{peer} {access}"), &options), Err(FaultKind::Race), "{access}");
    }
}

#[test]
fn the_source_of_a_copy_to_another_block_is_free_when_that_block_says_that_it_has_the_bytes() {
    let mut options = Options::default();
    options.happens_before = true;
    // Block 0 sends 16 bytes and writes them again; block 1 waits for them and arrives at block 0's second barrier.
    let sent = |wait: &str| {
        format!(
            "mbarrier.init.shared::cta.b64 [%s], 1; mbarrier.init.shared::cta.b64 [%s+8], 1;
             fence.mbarrier_init.release.cluster; {MEET}
             setp.eq.u32 %p, %r, 0; mov.u32 %w3, 7; mapa.shared::cluster.u32 %w0, %s, 1; @!%p bra TAKE;
             st.shared.v4.b32 [%s+64], {{%w3, %w3, %w3, %w3}}; fence.proxy.async.shared::cta;
             mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%w0], 16; add.u32 %w1, %w0, 128; add.u32 %w2, %s, 64;
             cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%w1], [%w2], 16, [%w0];
             {wait} st.shared.b32 [%s+64], %r; bra DONE;
             TAKE: mbarrier.try_wait.parity.shared::cta.b64 %q, [%s], 0; @!%q bra TAKE;
             mapa.shared::cluster.u32 %w0, %s, 0; mbarrier.arrive.shared::cluster.b64 _, [%w0+8];
             ld.shared.b32 %d, [%s+128]; DONE: {MEET}"
        )
    };
    let wait = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %q, [%s+8], 0; @!%q bra WAIT;";
    assert_eq!(two_blocks_apart(&sent(wait), &options), Ok(vec![0, 7]));
    assert_eq!(two_blocks_apart(&sent(""), &options), Err(FaultKind::Race));
}

#[test]
fn words_stored_to_another_block_are_there_when_its_barrier_has_counted_them() {
    let mut options = Options::default();
    options.happens_before = true;
    // Block 0 stores 16 bytes to block 1, which waits for them.
    let sent = |bytes: u32, wait: &str| {
        format!(
            "mbarrier.init.shared::cta.b64 [%s], 1; st.shared.b32 [%s+132], %r; fence.proxy.async.shared::cta;
             fence.mbarrier_init.release.cluster; {MEET}
             setp.eq.u32 %p, %r, 0; mov.u32 %w3, 7; mapa.shared::cluster.u32 %w0, %s, 1; @!%p bra TAKE;
             add.u32 %w1, %w0, 128;
             st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%w1], {{%r, %w3, %r, %r}}, [%w0]; bra DONE;
             TAKE: mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s], {bytes}; {wait}
             ld.shared.b32 %d, [%s+132]; DONE: {MEET}"
        )
    };
    let wait = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %q, [%s], 0; @!%q bra WAIT;";
    assert_eq!(two_blocks_apart(&sent(16, wait), &options), Ok(vec![0, 7]));
    assert_eq!(two_blocks_apart(&sent(16, ""), &options), Err(FaultKind::Race));
    assert_eq!(two_blocks_apart(&sent(20, wait), &options), Err(FaultKind::Deadlock));
}

#[test]
fn a_descriptor_is_read_as_it_stands_rank_and_all() {
    // One product of ones, no swizzle: rows of K 128 bytes apart (leading), groups of rows 256 (stride). `addr >> 4`
    // without a mask puts the rank of block 1 into the leading field: it then reads 256 bytes further.
    let body = |mask: &str| {
        format!(
            "{HEADER}.visible .entry k(.param .u64 o) {{ .shared .align 1024 .b8 mem[8192];
            .reg .pred %p; .reg .b32 %s, %t, %r, %a, %w, %acc<4>; .reg .b64 %g, %l, %x, %d;
            mov.u32 %s, mem; mov.u32 %r, %cluster_ctarank; mov.u32 %t, %tid.x; shl.b32 %a, %t, 2; add.u32 %a, %a, %s;
            mov.b32 %w, 0x3c003c00;
            st.shared.b32 [%a], %w; st.shared.b32 [%a+512], %w; st.shared.b32 [%a+1024], %w; st.shared.b32 [%a+1536], %w;
            mov.b32 %w, 0;
            st.shared.b32 [%a+2048], %w; st.shared.b32 [%a+2560], %w; st.shared.b32 [%a+3072], %w;
            fence.proxy.async; bar.sync 0;
            {mask} shr.u32 %s, %s, 4; cvt.u64.u32 %x, %s; add.s64 %x, %x, {}; mov.u64 %d, %x;
            wgmma.fence.sync.aligned;
            wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%acc0, %acc1, %acc2, %acc3}}, %x, %d, 0, 1, 1, 0, 0;
            wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
            setp.ne.u32 %p, %t, 124; @%p exit;
            ld.param.u64 %g, [o]; mul.wide.u32 %l, %r, 4; add.s64 %g, %g, %l; st.global.b32 [%g], %acc2; ret; }}",
            8u64 << 16 | 16u64 << 32
        )
    };
    let last_row = |mask: &str| {
        let device = Device::new();
        let out = upload(&device, &[0; 2]);
        let config = LaunchConfig {
            grid: [2, 1, 1],
            block: [128, 1, 1],
            cluster: [2, 1, 1],
            dynamic_shared: 0,
            dependent: false,
        };
        run(&device, &body(mask), &config, &out.to_le_bytes(), &Options::default()).unwrap();
        download(&device, out, 2).into_iter().map(f32::from_bits).collect::<Vec<_>>()
    };
    assert_eq!(last_row("and.b32 %s, %s, 0x3ffff;"), [16.0, 16.0]);
    assert_eq!(last_row(""), [16.0, 8.0]);
}

#[test]
fn a_word_of_another_block_is_written_behind_its_reads_by_arrivals_and_waits_of_cluster_scope_alone() {
    let mut options = Options::default();
    options.happens_before = true;
    // Block 1 reads its word and arrives at block 0's barrier; block 0 waits there and writes that word.
    let handed_back = |release: &str, acquire: &str| {
        format!(
            "mbarrier.init.shared::cta.b64 [%s], 1; fence.mbarrier_init.release.cluster; st.shared.b32 [%s+8], 5; {MEET}
             setp.eq.u32 %p, %r, 0; @%p bra WAIT;
             ld.shared.b32 %d, [%s+8]; mapa.shared::cluster.u32 %w0, %s, 0;
             mbarrier.arrive{release}.shared::cluster.b64 _, [%w0]; bra DONE;
             WAIT: mbarrier.try_wait.parity{acquire}.shared::cta.b64 %q, [%s], 0; @!%q bra WAIT;
             mapa.shared::cluster.u32 %w0, %s, 1; mov.u32 %w1, 7; st.shared::cluster.b32 [%w0+8], %w1; DONE: {MEET}"
        )
    };
    for (release, acquire, expected) in [
        (".release.cluster", ".acquire.cluster", Ok(vec![0, 5])),
        ("", ".acquire.cluster", Err(FaultKind::Race)),
        (".release.cluster", "", Err(FaultKind::Race)),
        ("", "", Err(FaultKind::Race)),
    ] {
        let found = two_blocks_apart(&handed_back(release, acquire), &options);
        assert_eq!(found, expected, "arrive{release}, wait{acquire}");
    }
}
