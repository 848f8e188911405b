//! Each kind of fault has a kernel that meets it: no name is printed in reports that nothing can bring about.
#![allow(clippy::unwrap_used, reason = "a failure in a helper fails its test")]

mod common;

use common::{HEADER, block, checked, run, upload_bytes};
use fmha_emu_ptx::{Device, Fault, FaultKind, LaunchConfig, Report, TensorMap};

/// Sixteen bytes of shared memory from each thread, seen by the asynchronous proxy.
const FILL: &str = "shl.b32 %w6, %t, 4; add.u32 %w6, %w6, %s; st.shared.v4.b32 [%w6], {%t, %t, %t, %t};
    fence.proxy.async.shared::cta; bar.sync 0;";
/// A product of what lies at the start of shared memory, as rows of 16 bytes without a swizzle.
const PRODUCT: &str =
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %x3, %x3, 0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;";
const WAIT: &str = "W: mbarrier.try_wait.parity.shared::cta.b64 %q, [%s+8192], 0; @!%q bra W;";

/// Runs `body` on one block: `%t` the thread, `%p` whether it is the first, `%s` 12 KiB of shared memory,
/// `%g` 512 bytes, `map` a tile of 64 rows of 128 bytes with a swizzle of 128 bytes.
fn run_body(body: &str, config: LaunchConfig) -> Result<Report, Fault> {
    let device = Device::new();
    let map = TensorMap {
        data_type: 9,
        rank: 2,
        address: upload_bytes(&device, &[0; 8192]),
        dims: [64, 64, 1, 1, 1],
        strides: [128, 0, 0, 0],
        box_dims: [64, 64, 1, 1, 1],
        element_strides: [1; 5],
        interleave: 0,
        swizzle: 3,
        nan_fill: false,
    };
    let ptx = format!(
        "{HEADER}.visible .entry k(.param .align 64 .b8 map[128], .param .u64 d) {{
        .shared .align 1024 .b8 mem[12288];
        .reg .pred %p, %q; .reg .b32 %t, %s, %w<8>; .reg .f32 %f<4>; .reg .b64 %g, %x<4>;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; mov.u32 %s, mem; ld.param.u64 %g, [d];
        and.b32 %w7, %s, 0x3ffff; shr.u32 %w7, %w7, 4; cvt.u64.u32 %x3, %w7; or.b64 %x3, %x3, 0x1000080000;
        {body} ret; }}"
    );
    let mut args = map.encode().to_vec();
    args.extend(upload_bytes(&device, &[0; 512]).to_le_bytes());
    let mut options = checked();
    options.spin_limit = 100_000;
    run(&device, &ptx, &config, &args, &options)
}

/// The body of a kernel that meets a fault of this kind, if this test knows one.
fn body(kind: FaultKind) -> Option<String> {
    Some(match kind {
        FaultKind::Syntax => "add.u32 %w0, %undeclared, 1;".to_owned(),
        FaultKind::Unsupported => "undocumented.u32 %w0;".to_owned(),
        FaultKind::OutOfBounds => "ld.global.b32 %w0, [%g+512];".to_owned(),
        FaultKind::Misaligned => "ld.global.b32 %w0, [%g+2];".to_owned(),
        FaultKind::Uninitialised => "ld.shared.b32 %w0, [%s];".to_owned(),
        FaultKind::Race => "st.shared.b32 [%s], %t;".to_owned(),
        FaultKind::MissingProxyFence => "@%p st.shared.v4.b32 [%s], {%t, %t, %t, %t};
            @%p cp.async.bulk.global.shared::cta.bulk_group [%g], [%s], 16;"
            .to_owned(),
        FaultKind::RegisterInFlight => {
            format!("{FILL} wgmma.fence.sync.aligned; {PRODUCT} mov.b32 %w0, %f0;")
        }
        FaultKind::MissingWgmmaFence => format!("{FILL} {PRODUCT}"),
        FaultKind::DivergentCollective => {
            "setp.lt.u32 %q, %t, 16; @%q shfl.sync.idx.b32 %w0, %t, 0, 31, -1;".to_owned()
        }
        FaultKind::Deadlock => {
            format!("@%p mbarrier.init.shared::cta.b64 [%s+8192], 2; bar.sync 0; {WAIT}")
        }
        FaultKind::Livelock => {
            "L: ld.volatile.global.b32 %w0, [%g]; setp.eq.u32 %q, %w0, 0; @%q bra L;".to_owned()
        }
        FaultKind::Barrier => "@%p mbarrier.init.shared::cta.b64 [%s], 1;".repeat(2),
        FaultKind::RegisterBudget => "setmaxnreg.inc.sync.aligned.u32 257;".to_owned(),
        // Bit 49 begins the base offset.
        FaultKind::Descriptor => {
            format!("{FILL} or.b64 %x3, %x3, 0x2000000000000; wgmma.fence.sync.aligned; {PRODUCT}")
        }
        FaultKind::Swizzle => format!(
            "@%p mbarrier.init.shared::cta.b64 [%s+8192], 1; @%p fence.mbarrier_init.release.cluster; bar.sync 0;
            @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%s+8192], 8192;
            @%p cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%s], [map, {{0, 0}}],
            [%s+8192]; {WAIT} wgmma.fence.sync.aligned; {PRODUCT}"
        ),
        FaultKind::TensorMemory => {
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s], 33;".to_owned()
        }
        FaultKind::MissingGridWait => "ld.global.b32 %w0, [%g];".to_owned(),
        FaultKind::Trap => "trap;".to_owned(),
        // A launch with more threads than a block may have.
        FaultKind::Launch => String::new(),
        _ => return None,
    })
}

#[test]
fn every_kind_of_fault_has_a_kernel_that_meets_it() {
    for &kind in FaultKind::ALL {
        let body = body(kind).unwrap_or_else(|| panic!("no kernel for {kind:?}"));
        let threads = if kind == FaultKind::Launch { 2048 } else { 128 };
        let dependent = kind == FaultKind::MissingGridWait;
        let found = run_body(&body, LaunchConfig { dependent, ..block(threads, 0) }).map(|_| "no fault");
        assert_eq!(found.as_ref().map_err(|fault| fault.kind), Err(kind), "{found:?}");
    }
    let product = format!("{FILL} wgmma.fence.sync.aligned; {PRODUCT} wgmma.wait_group.sync.aligned 0;");
    assert!(run_body(&product, block(128, 0)).is_ok());
}

#[test]
fn an_operand_that_is_not_there_is_named_by_its_number() {
    for (body, number) in [
        ("setp.lt.and.u32 %p, %t, %t;", 4),
        ("mbarrier.arrive.shared::cta.b64 %x0;", 2),
        ("mbarrier.test_wait.shared::cta.b64 %p;", 2),
        ("mbarrier.pending_count.b64 %w0;", 2),
        ("mbarrier.inval.shared::cta.b64;", 1),
    ] {
        let fault = run_body(body, block(32, 0)).unwrap_err();
        let named = fault.text.contains(&format!("has no operand {number}"));
        assert!(fault.kind == FaultKind::Syntax && named, "{body}: {fault}");
    }
}
