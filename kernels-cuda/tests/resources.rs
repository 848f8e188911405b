//! Every kernel of the table compiles for Hopper without a GPU, in the registers that the committed table lists,
//! without a spill and without a serialised wgmma.
//!
//! Needs NVRTC: the library's path in `FMHA_NVRTC`, or its name on the loader's path. Without NVRTC the test prints a
//! message and checks nothing.

#![allow(clippy::unwrap_used)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use fmha_core::choose_params::IndexSpec;
use fmha_core::code_source::CodeSource;
use fmha_core::source::KernelSource;
use fmha_core::sparse::Indexer;
use fmha_core::spec::{BiasKind, BwdSpec, CombineSpec, FwdSpec, KvKind};
use fmha_core::value_params::BlockValuesSpec;
use fmha_core::{
    BiasGrad, BlockFormat, BwdProblem, CacheRows, CapturedTensor, DType, Dims, FwdProblem, Intervals,
    KeyLists, KvLayout, ListEntries, MaskAxes, MaskKind, MaskSpec, Merge, QLayout, SecondCache, VLayout,
};
use fmha_gpu::RowKernel;
use fmha_kernels_cuda::sm80::{Room, Sm80Tile};
use fmha_kernels_cuda::sm90::{Lookahead, PrepareV, Sm90Tile, TileOrder};
use fmha_kernels_cuda::sm90_mla::Sm90MlaTile;
use fmha_kernels_cuda::sm100::Sm100Tile;
use fmha_kernels_cuda::sm100_mla::Sm100MlaTile;
use fmha_kernels_cuda::split;
use fmha_kernels_cuda::tile_list::{MaskCode, TileOf};
use fmha_kernels_cuda::{
    COMPILE_OPTIONS, rows, sm80, sm80_bwd, sm80_index, sm80_lists_bwd, sm90, sm90_bwd, sm90_index,
    sm90_lists_bwd, sm90_mla, sm100, sm100_bwd, sm100_mla, tile_list,
};
use libloading::Library;

/// Compiles a kernel with NVRTC and returns the log, or the compiler's error.
fn compile(nvrtc: &Library, source: &KernelSource, arch: &str) -> Result<String, String> {
    type Program = *mut c_void;
    type Create = unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int;
    type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
    type LogSize = unsafe extern "C" fn(Program, *mut usize) -> c_int;
    type Log = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
    type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

    let text = |text: &str| CString::new(text).unwrap();
    let entry = text(&source.entry);
    let headers = source.headers();
    let names: Vec<CString> = headers.iter().map(|header| text(&header.name)).collect();
    let texts: Vec<CString> = headers.iter().map(|header| text(&header.text)).collect();
    let arch = format!("--gpu-architecture={arch}");
    let options: Vec<CString> =
        COMPILE_OPTIONS.iter().chain(&[arch.as_str(), "-Xptxas=-v"]).map(|option| text(option)).collect();
    let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    // SAFETY: the signatures are those of nvrtc.h; every pointer outlives its call; the log has the size that NVRTC
    // reports.
    unsafe {
        let mut program: Program = std::ptr::null_mut();
        let create = nvrtc.get::<Create>(b"nvrtcCreateProgram").unwrap();
        let (names, texts, options) = (pointers(&names), pointers(&texts), pointers(&options));
        let count = headers.len() as c_int;
        let created = create(
            &raw mut program,
            entry.as_ptr(),
            c"entry.cu".as_ptr(),
            count,
            texts.as_ptr(),
            names.as_ptr(),
        );
        assert_eq!(created, 0, "nvrtcCreateProgram");
        let status = nvrtc.get::<Compile>(b"nvrtcCompileProgram").unwrap()(
            program,
            options.len() as c_int,
            options.as_ptr(),
        );
        let mut size = 0;
        nvrtc.get::<LogSize>(b"nvrtcGetProgramLogSize").unwrap()(program, &raw mut size);
        let mut log = vec![0u8; size.max(1)];
        nvrtc.get::<Log>(b"nvrtcGetProgramLog").unwrap()(program, log.as_mut_ptr().cast());
        nvrtc.get::<Destroy>(b"nvrtcDestroyProgram").unwrap()(&raw mut program);
        let log = CStr::from_bytes_until_nul(&log).unwrap().to_string_lossy().into_owned();
        if status == 0 { Ok(log) } else { Err(log) }
    }
}

/// Number before `after` in the last line of the log that contains `after`.
fn number_before(log: &str, after: &str) -> u32 {
    let before = &log[..log.rfind(after).unwrap_or_else(|| panic!("no `{after}` in {log}"))];
    before.split_whitespace().next_back().unwrap().parse().unwrap()
}

fn kernels() -> Vec<(String, KernelSource)> {
    let mut kernels = Vec::new();
    for (mask, mask_name) in [(MaskKind::Full, "full"), (MaskKind::Upper, "upper"), (MaskKind::Band, "band")]
    {
        for (qk, v) in [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)] {
            let spec = FwdSpec { head_dim_v: v, ..FwdSpec::plain(DType::Bf16, qk, mask) };
            kernels
                .push((format!("sm90_{qk}x{v}_{mask_name}"), sm90::fwd(&spec, &sm90::default_tile(&spec))));
        }
    }
    let mut variant = |name: &str, spec: FwdSpec, change: fn(&mut Sm90Tile)| {
        let mut tile = sm90::default_tile(&spec);
        change(&mut tile);
        kernels.push((name.to_owned(), sm90::fwd(&spec, &tile)));
    };
    let upper = |dim| FwdSpec::plain(DType::Bf16, dim, MaskKind::Upper);
    variant("sm90_64_upper_short", upper(64), |tile| tile.block_m = 128);
    variant("sm90_128_upper_few_rows", upper(128), |tile| tile.block_m = 64);
    variant("sm90_128_upper_packed", upper(128), |tile| tile.pack_gqa = true);
    variant("sm90_128_upper_cluster", upper(128), |tile| {
        (tile.cluster, tile.order) = (2, TileOrder::Dynamic);
    });
    variant("sm90_128_upper_cluster_heads", upper(128), |tile| {
        (tile.cluster, tile.cluster_heads, tile.order) = (2, true, TileOrder::Dynamic);
    });
    variant("sm90_192_upper_cluster", upper(192), |tile| {
        (tile.cluster, tile.order) = (2, TileOrder::Dynamic);
    });
    // The variants have rows of whole swizzles beside narrower products, few tiles of few rows, and short blocks.
    variant("sm90_72_full", FwdSpec::plain(DType::Bf16, 72, MaskKind::Full), |_| {});
    variant("sm90_136_upper", upper(136), |_| {});
    variant("sm90_240_upper_cluster", upper(240), |tile| {
        (tile.cluster, tile.order) = (2, TileOrder::Dynamic);
    });
    let low = |tile: &mut Sm90Tile| *tile = tile.of_shape((64, tile.block_n));
    variant("sm90_64_full_low", FwdSpec::plain(DType::Bf16, 64, MaskKind::Full), low);
    variant("sm90_256_upper_low", upper(256), low);
    variant("sm90_128_full_144_keys", FwdSpec::plain(DType::Bf16, 128, MaskKind::Full), |tile| {
        *tile = tile.of_shape((128, 144));
    });
    variant("sm90_256_full_cluster", FwdSpec::plain(DType::Bf16, 256, MaskKind::Full), |tile| {
        (tile.cluster, tile.order) = (2, TileOrder::Dynamic);
    });
    variant("sm90_128_upper_with_maxima", upper(128), |tile| tile.skip_row_max = false);
    variant("sm90_128_full_cluster", FwdSpec::plain(DType::Bf16, 128, MaskKind::Full), |tile| {
        (tile.cluster, tile.order) = (2, TileOrder::Dynamic);
    });
    variant("sm90_128_softcap", FwdSpec { softcap: true, ..upper(128) }, |_| {});
    variant("sm90_256_alibi", FwdSpec { bias: BiasKind::Alibi, ..upper(256) }, |_| {});
    variant("sm90_128_upper_q_in_registers", upper(128), |tile| tile.q_in_registers = true);
    variant("sm90_128_upper_dropout", FwdSpec { dropout: true, ..upper(128) }, |_| {});
    variant("sm90_64_upper_dropout", FwdSpec { dropout: true, ..upper(64) }, |_| {});
    let biased = |dim, mask| FwdSpec {
        bias: BiasKind::Elementwise,
        dtype_bias: DType::Bf16,
        ..FwdSpec::plain(DType::Bf16, dim, mask)
    };
    variant("sm90_64_upper_bias", biased(64, MaskKind::Upper), |_| {});
    variant("sm90_128_full_bias", biased(128, MaskKind::Full), |_| {});
    variant("sm90_128_upper_bias", biased(128, MaskKind::Upper), |_| {});
    variant("sm90_256_full_bias", biased(256, MaskKind::Full), |_| {});
    let columns = FwdSpec { v_layout: VLayout::ColMajor, ..upper(128) };
    variant("sm90_128_upper_v_columns", columns, |_| {});
    let group = FwdSpec {
        q_layout: QLayout::Packed,
        kv_layout: KvKind::Packed,
        ..FwdSpec::plain(DType::F16, 128, MaskKind::Upper)
    };
    kernels.push(("sm90_128_upper_group".to_owned(), sm90::fwd(&group, &sm90::default_tile(&group))));
    // Kernels for parts of a fixed number of keys: a tile that folds the parts, and a launch that folds those of
    // single-part tiles.
    for (name, spec) in [
        ("sm90_64_upper_folds", FwdSpec::plain(DType::Bf16, 64, MaskKind::Upper)),
        ("sm90_128_upper_folds", FwdSpec::plain(DType::Bf16, 128, MaskKind::Upper)),
    ] {
        let table = sm90::default_tile(&spec);
        let tile = Sm90Tile { skip_row_max: false, fold_keys: split::FIXED_KEYS, ..table };
        kernels.push((name.to_owned(), sm90::fwd(&spec, &tile)));
        let in_shared = Sm90Tile { lookahead: Lookahead::Off, fold_in_shared: true, ..tile };
        kernels.push((format!("{name}_in_shared"), sm90::fwd(&spec, &in_shared)));
    }
    for (name, warps) in [("sm90_fold_128", 1), ("sm90_fold_128_columns", 4)] {
        let upper = FwdSpec::plain(DType::Bf16, 128, MaskKind::Upper);
        let merging = split::Merging {
            stored: DType::Bf16,
            row_bytes: 0,
            warps,
            dependent: true,
            in_shares: false,
            folds: true,
        };
        kernels.push((name.to_owned(), split::merge(&upper, merging)));
    }
    // Kernels with lists of tiles under masks as data, and the launch that makes the lists.
    for (name, spec) in [
        ("sm90_64_masks", FwdSpec::plain(DType::Bf16, 64, MaskKind::Upper)),
        ("sm90_128_masks", FwdSpec::plain(DType::Bf16, 128, MaskKind::Upper)),
        ("sm90_256_masks", FwdSpec::plain(DType::Bf16, 256, MaskKind::Upper)),
        ("sm90_128_band_masks", FwdSpec::plain(DType::Bf16, 128, MaskKind::Band)),
    ] {
        let tile = sm90::default_tile(&spec);
        let tile = Sm90Tile { block_m: tile.block_m.min(128), ..tile };
        kernels.push((name.to_owned(), sm90::fwd_masked(&spec, &tile, false)));
    }
    let spec = FwdSpec::plain(DType::Bf16, 128, MaskKind::Upper);
    kernels.push((
        "tile_list".to_owned(),
        tile_list::list_tiles(&spec, TileOf::Queries, [128, 128], MaskCode::None),
    ));
    kernels.push(("tile_ranks".to_owned(), tile_list::rank_tiles(&spec, 128)));
    kernels.push((
        "simt_128_band".to_owned(),
        rows::source(RowKernel::Simt, &FwdSpec::plain(DType::Bf16, 128, MaskKind::Band)),
    ));
    let merge =
        CombineSpec { dtype_part: DType::F32, dtype_o: DType::Bf16, head_dim_v: 128, merge: Merge::ByLse };
    kernels.push(("combine_128".to_owned(), rows::source(RowKernel::Combine, &merge)));
    let fp8 = |dim, mask, dtype_v| FwdSpec {
        dtype_v,
        dtype_o: DType::Bf16,
        ..FwdSpec::plain(DType::E4m3Fn, dim, mask)
    };
    let all = |dim, mask| fp8(dim, mask, DType::E4m3Fn);
    let upper = all(128, MaskKind::Upper);
    for (name, spec) in [
        ("128_upper", upper),
        ("64_full", all(64, MaskKind::Full)),
        ("192_full", all(192, MaskKind::Full)),
        ("256_band", all(256, MaskKind::Band)),
        ("128_band", all(128, MaskKind::Band)),
        ("128_upper_v_columns", FwdSpec { v_layout: VLayout::ColMajor, ..upper }),
        ("128_upper_o_fp8", FwdSpec { dtype_o: DType::E4m3Fn, ..upper }),
        ("128_upper_softcap", FwdSpec { softcap: true, ..upper }),
        ("128_upper_v_bf16", fp8(128, MaskKind::Upper, DType::Bf16)),
    ] {
        kernels.push((format!("sm90_fp8_{name}"), sm90::fwd(&spec, &sm90::default_tile(&spec))));
    }
    // Kernels whose V is prepared in the workspace, with the blocks and stages of long sequences.
    for (name, dim, mask) in [
        ("64_full", 64, MaskKind::Full),
        ("96_upper", 96, MaskKind::Upper),
        ("128_full", 128, MaskKind::Full),
        ("128_upper", 128, MaskKind::Upper),
        ("192_full", 192, MaskKind::Full),
        ("256_full", 256, MaskKind::Full),
    ] {
        let spec = all(dim, mask);
        let mut tile = Sm90Tile { prepare_v: PrepareV::Beside, stages: 3, ..sm90::default_tile(&spec) };
        if dim == 128 {
            (tile.block_m, tile.block_n, tile.wait_anchor) = (128, 128, 32);
        }
        kernels.push((format!("sm90_fp8_{name}_beside"), sm90::fwd(&spec, &tile)));
        let tile = Sm90Tile { prepare_v: PrepareV::Before, ..tile };
        kernels.push((format!("sm90_fp8_{name}_before"), sm90::fwd(&spec, &tile)));
        kernels.push((format!("sm90_fp8_{name}_prepare"), sm90::prepare_values(&spec, &tile)));
    }
    kernels.extend(shares());
    // Kernels for few tiles, with fewer rows and more keys in a block.
    for (name, dim, shape) in [
        ("128_upper_lower", 128, (128, 128)),
        ("128_upper_low", 128, (64, 128)),
        ("192_upper_low", 192, (64, 128)),
    ] {
        let spec = all(dim, MaskKind::Upper);
        let tile = sm90::default_tile(&spec).of_shape(shape);
        kernels.push((format!("sm90_fp8_{name}"), sm90::fwd(&spec, &tile)));
    }
    kernels
}

/// Kernels of Hopper for caches: pages loaded by TMA (whole tiles, shares, FP8 with prepared V) and by copies, and FP8
/// caches under 16-bit queries.
fn caches() -> Vec<(String, KernelSource)> {
    let paged = |dim, mask| FwdSpec { kv_layout: KvKind::Paged, ..FwdSpec::plain(DType::Bf16, dim, mask) };
    let own = |spec: &FwdSpec| {
        let table = sm90::default_tile(spec);
        Sm90Tile { block_m: table.block_m.min(128), page_keys: 16, ..table }
    };
    let whole = |name: &str, spec: FwdSpec| (format!("sm90_{name}_pages"), sm90::fwd(&spec, &own(&spec)));
    let upper = |dim| paged(dim, MaskKind::Upper);
    let shared = |name: &str, dim, block_m| {
        let spec = split::part_spec(&upper(dim));
        let table = own(&spec);
        let (order, split_keys) = (TileOrder::Static, table.block_n);
        let tile = Sm90Tile { block_m, split_keys, order, shares: 132, pack_gqa: true, ..table };
        let tile = Sm90Tile { skip_row_max: false, dependent_launch: false, ..tile };
        (format!("sm90_{name}_pages_in_shares"), sm90::fwd(&spec, &tile))
    };
    let copied = Sm90Tile { page_keys: 0, copy_bytes: 16, ..own(&upper(128)) };
    let fp8 = FwdSpec { dtype_qk: DType::E4m3Fn, dtype_v: DType::E4m3Fn, ..upper(128) };
    let of_fp8 = Sm90Tile { block_m: 128, block_n: 128, stages: 2, wait_anchor: 32, ..own(&fp8) };
    let narrow = |name: &str, spec: FwdSpec, stored: DType, of: Sm90Tile| {
        let mut tile = of.over_narrow_cache(stored);
        tile.take_raw_stages(&spec).unwrap();
        (format!("sm90_{name}_cache_{stored}"), sm90::fwd(&spec, &tile))
    };
    let row = |dim| FwdSpec::plain(DType::Bf16, dim, MaskKind::Upper);
    let part = split::part_spec(&upper(128));
    let of_part =
        Sm90Tile { block_m: 64, split_keys: 128, pack_gqa: true, skip_row_max: false, ..own(&part) };
    vec![
        narrow("128_pages", upper(128), DType::E4m3Fn, own(&upper(128))),
        narrow("128_part", part, DType::E5m2, of_part),
        narrow("192", row(192), DType::E4m3Fn, sm90::default_tile(&row(192))),
        narrow("256", row(256), DType::E4m3Fn, sm90::default_tile(&row(256))),
        whole("64_upper", upper(64)),
        whole("128_full", paged(128, MaskKind::Full)),
        whole("128_upper", upper(128)),
        whole("128_band", paged(128, MaskKind::Band)),
        whole("192_upper", upper(192)),
        whole("256_upper", upper(256)),
        shared("128_low", 128, 64),
        shared("128", 128, 128),
        shared("256", 256, 128),
        ("sm90_128_pages_copied".to_owned(), sm90::fwd(&upper(128), &copied)),
        ("sm90_fp8_128_pages".to_owned(), sm90::fwd(&fp8, &of_fp8)),
    ]
}

/// Kernels for short queries whose keys are divided among CTAs in equal shares.
fn shares() -> Vec<(String, KernelSource)> {
    let part = |dim| split::part_spec(&FwdSpec::plain(DType::Bf16, dim, MaskKind::Upper));
    let of_sm90 = |dim, block_m| {
        let spec = part(dim);
        let table = sm90::default_tile(&spec);
        let (order, split_keys) = (TileOrder::Static, table.block_n);
        let tile = Sm90Tile { block_m, split_keys, order, shares: 132, pack_gqa: true, ..table };
        let tile = Sm90Tile { skip_row_max: false, dependent_launch: false, ..tile };
        (format!("sm90_{dim}_shares"), sm90::fwd(&spec, &tile))
    };
    let room = Room { smem_bytes: 232_448, num_sms: 132 };
    let of_sm80 = |dim, stored: DType, (block_m, warps, ctas), pages: bool| {
        let mut spec = part(dim);
        spec.kv_layout = if pages { KvKind::Paged } else { KvKind::Strided };
        let tile = Sm80Tile { block_m, warps, ctas, stored, ..sm80::default_tile(&spec, room) };
        let tile = Sm80Tile { block_n: 32, stages: 1, split_keys: 32, shares: 132 * ctas, ..tile };
        let tile = Sm80Tile { pack_gqa: true, block_in_page: !pages, converts_fp8: true, ..tile };
        let words = if pages { "pages" } else { "rows" };
        (format!("sm80_{dim}x{block_m}_{stored}_{words}"), sm80::fwd(&spec, &tile))
    };
    vec![
        of_sm90(128, 64),
        of_sm90(256, 128),
        of_sm80(128, DType::Bf16, (16, 1, 8), false),
        of_sm80(128, DType::Bf16, (16, 1, 8), true),
        of_sm80(256, DType::Bf16, (16, 1, 4), false),
        of_sm80(128, DType::E4m3Fn, (16, 1, 8), false),
        of_sm80(256, DType::E4m3Fn, (16, 1, 8), false),
        of_sm80(128, DType::E4m3Fn, (32, 2, 6), false),
    ]
}

/// Kernels of Blackwell's forward for everything that changes their registers: head dimensions, masks, modifiers.
fn blackwell_kernels(arch: &str) -> Vec<(String, KernelSource)> {
    let plain = |qk, v, mask| FwdSpec { head_dim_v: v, ..FwdSpec::plain(DType::Bf16, qk, mask) };
    let upper = plain(128, 128, MaskKind::Upper);
    let mut specs = vec![
        ("128_dropout".to_owned(), FwdSpec { dropout: true, ..upper }),
        ("128_softcap".to_owned(), FwdSpec { softcap: true, ..upper }),
        ("128_alibi".to_owned(), FwdSpec { bias: BiasKind::Alibi, ..upper }),
        ("128_bias".to_owned(), FwdSpec { bias: BiasKind::Elementwise, ..upper }),
        ("128_v_columns".to_owned(), FwdSpec { v_layout: VLayout::ColMajor, ..upper }),
        ("128_group".to_owned(), FwdSpec { q_layout: QLayout::Packed, kv_layout: KvKind::Packed, ..upper }),
        ("128_f32_output".to_owned(), FwdSpec { dtype_o: DType::F32, ..upper }),
    ];
    for (qk, v) in [(64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256)] {
        specs.push((format!("{qk}x{v}_upper"), plain(qk, v, MaskKind::Upper)));
    }
    for (mask, name) in [(MaskKind::Full, "full"), (MaskKind::Band, "band")] {
        specs.push((format!("128x128_{name}"), plain(128, 128, mask)));
    }
    let fp8 = FwdSpec { dtype_qk: DType::E4m3Fn, dtype_v: DType::E4m3Fn, ..upper };
    specs.push(("128_fp8".to_owned(), fp8));
    specs.push(("128_fp8_output".to_owned(), FwdSpec { dtype_o: DType::E4m3Fn, ..fp8 }));
    let reduces = sm100::REDUCING_ARCHS.contains(&arch);
    let own = |tile: Sm100Tile| {
        let pairs = if arch == sm100::FAST_EXP_ARCH { 0 } else { tile.exp2_polynomial_pairs };
        Sm100Tile { load_max: reduces, exp2_polynomial_pairs: pairs, ..tile }
    };
    let kernel = |(name, spec): (String, FwdSpec)| {
        (format!("sm100_{name}"), sm100::fwd(&spec, &own(sm100::default_tile(&spec))))
    };
    let mut kernels: Vec<_> = specs.into_iter().map(kernel).collect();
    // Kernels with pairs of CTAs where the tile has them, with a single CTA where the table has pairs, and with loads
    // by copies.
    let wide = plain(256, 256, MaskKind::Upper);
    let columns = FwdSpec { v_layout: VLayout::ColMajor, ..upper };
    let copied =
        |spec, copy_bytes| sm100::fwd(spec, &Sm100Tile { copy_bytes, ..own(sm100::default_tile(spec)) });
    let pair = Sm100Tile { cluster: 2, ..own(sm100::default_tile(&upper)) };
    kernels.push(("sm100_128_pair".to_owned(), sm100::fwd(&upper, &pair)));
    kernels.push((
        "sm100_256_alone".to_owned(),
        sm100::fwd(&wide, &own(sm100::default_tile(&wide).alone(&wide))),
    ));
    kernels.push(("sm100_128_fp8_copied".to_owned(), copied(&fp8, 1)));
    kernels.push(("sm100_128_v_columns_copied".to_owned(), copied(&columns, 2)));
    let part = split::part_spec(&upper);
    let tile = Sm100Tile { block_m: 128, split_keys: 256, pack_gqa: true, ..own(sm100::default_tile(&part)) };
    kernels.push(("sm100_128_part_of_keys".to_owned(), sm100::fwd(&part, &tile)));
    // Kernels for few queries over pages: shares, a group that leaves rows over, copies, two query tiles, a tree mask.
    for (name, dim) in [("128", 128), ("256", 256)] {
        let paged =
            FwdSpec { kv_layout: KvKind::Paged, ..split::part_spec(&plain(dim, dim, MaskKind::Upper)) };
        let alone = own(sm100::default_tile(&paged).alone(&paged));
        let shared = Sm100Tile {
            block_m: 128,
            split_keys: alone.block_n,
            shares: 148,
            pack_gqa: true,
            whole_groups: true,
            page_keys: 16,
            ..alone
        };
        kernels.push((format!("sm100_{name}_pages_in_shares"), sm100::fwd(&paged, &shared)));
        kernels.push((format!("sm100_{name}_pages_tree"), sm100::fwd_tree(&paged, &shared)));
        let copied = Sm100Tile { page_keys: 0, copy_bytes: 16, ..shared };
        kernels.push((format!("sm100_{name}_pages_copied"), sm100::fwd(&paged, &copied)));
        let whole = Sm100Tile { page_keys: 64, ..alone };
        kernels.push((format!("sm100_{name}_pages_whole"), sm100::fwd(&paged, &whole)));
    }
    let merging = split::Merging {
        stored: upper.dtype_qk,
        row_bytes: 0,
        warps: 8,
        dependent: true,
        in_shares: false,
        folds: false,
    };
    kernels.push(("sm100_merge_128".to_owned(), split::merge(&upper, merging)));
    kernels.extend(blackwell_backward());
    kernels
}

/// Blackwell's forward over MXFP8 and NVFP4: head dimensions with one and two query tiles, V by columns and by rows,
/// pages, loads by copies, masks as data; and the launch that writes values for gradients.
fn scaled_kernels(arch: &str) -> Vec<(String, KernelSource)> {
    type Change = fn(FwdProblem) -> FwdProblem;
    let paged: Change = |mut problem| {
        problem.layout.kv = KvLayout::Paged { page_size: 64 };
        problem
    };
    let cases: [(&str, u32, u32, Change); 8] = [
        ("64x64", 64, 64, |problem| problem),
        ("128x128", 128, 128, |problem| problem),
        ("192x128", 192, 128, |problem| problem),
        ("256x256", 256, 256, |problem| problem),
        ("128_v_columns", 128, 128, |problem| problem.v_layout(VLayout::ColMajor)),
        ("128_dropout", 128, 128, |problem| problem.p_drop(0.25)),
        ("100x100_copied", 100, 100, |problem| problem),
        ("128_pages", 128, 128, paged),
    ];
    let in_format = |problem: FwdProblem, name: &str, format| {
        let problem = problem.mask(MaskSpec::CAUSAL).with_block_scales(format);
        let tile = sm100::choose_tile(&problem, arch, 148);
        let name = format!("sm100_{name}_{}", if format == BlockFormat::Nvfp4 { "nvfp4" } else { "mxfp8" });
        let spec = sm100::spec_of(&problem);
        let source = match problem.masks.is_empty() {
            true => sm100::fwd_scaled(&spec, &tile),
            false => sm100::fwd_masked_scaled(&spec, &tile, false),
        };
        (name, source)
    };
    let of_dims = |qk, v| FwdProblem::batch(DType::Bf16, one_head(qk, v));
    let mxfp8 = cases
        .into_iter()
        .map(|(name, qk, v, change)| in_format(change(of_dims(qk, v)), name, BlockFormat::Mxfp8E4m3));
    let nvfp4 =
        [("64x64", 64, 64), ("128x128", 128, 128), ("256x256", 256, 256), ("100x100_copied", 100, 100)];
    let nvfp4 = nvfp4
        .into_iter()
        .map(|(name, qk, v)| in_format(of_dims(qk, v).v_layout(VLayout::ColMajor), name, BlockFormat::Nvfp4));
    // Rows of pairs are transposed by one warp, or by the two that copy.
    let by_rows: [(&str, u32, u32, Change); 6] = [
        ("64x64_rows", 64, 64, |problem| problem),
        ("128x128_rows", 128, 128, |problem| problem),
        ("160x160_rows", 160, 160, |problem| problem),
        ("256x256_rows", 256, 256, |problem| problem),
        ("100x100_rows_copied", 100, 100, |problem| problem),
        ("128_rows_pages", 128, 128, paged),
    ];
    let by_rows = by_rows
        .into_iter()
        .map(|(name, qk, v, change)| in_format(change(of_dims(qk, v)), name, BlockFormat::Nvfp4));
    let masked = |mut problem: FwdProblem| {
        let axes = MaskAxes { per_batch: false, heads: 1 };
        problem.masks.intervals = Some(Intervals::batch(&problem, axes, 4));
        problem
    };
    let under_masks =
        [(BlockFormat::Mxfp8E4m3, 128), (BlockFormat::Mxfp8E4m3, 256), (BlockFormat::Nvfp4, 128)]
            .map(|(format, dim)| in_format(masked(of_dims(dim, dim)), &format!("{dim}_masked"), format));
    let values = [
        ("mxfp8_to_bf16", DType::Bf16, BlockFormat::Mxfp8E4m3, VLayout::RowMajor),
        ("nvfp4_to_bf16", DType::Bf16, BlockFormat::Nvfp4, VLayout::RowMajor),
        ("nvfp4_v_columns_to_bf16", DType::Bf16, BlockFormat::Nvfp4, VLayout::ColMajor),
        ("mxfp8_to_f32", DType::F32, BlockFormat::Mxfp8E5m2, VLayout::RowMajor),
    ]
    .map(|(name, dtype, format, layout)| {
        let problem = FwdProblem::batch(dtype, one_head(128, 128)).v_layout(layout).with_block_scales(format);
        let spec = BlockValuesSpec::of(&problem).unwrap();
        (format!("block_values_{name}"), rows::source(RowKernel::BlockValues, &spec))
    });
    mxfp8.chain(nvfp4).chain(by_rows).chain(under_masks).chain(values).collect()
}

/// Kernels of Blackwell's backward: each head dimension's tile, masks, and modifiers.
fn blackwell_backward() -> Vec<(String, KernelSource)> {
    type Change = fn(&mut BwdSpec);
    let cases: [(&str, i32, MaskKind, Change); 20] = [
        ("64_upper", 64, MaskKind::Upper, |_| {}),
        ("128_full", 128, MaskKind::Full, |_| {}),
        ("128_upper", 128, MaskKind::Upper, |_| {}),
        ("128_band_f16", 128, MaskKind::Band, |spec| {
            (spec.fwd.dtype_qk, spec.fwd.dtype_v, spec.fwd.dtype_o) = (DType::F16, DType::F16, DType::F16);
            spec.dtype_grad = DType::F16;
        }),
        ("128_dropout", 128, MaskKind::Upper, |spec| spec.fwd.dropout = true),
        ("128_softcap", 128, MaskKind::Upper, |spec| spec.fwd.softcap = true),
        ("128_bias", 128, MaskKind::Upper, |spec| {
            (spec.fwd.bias, spec.fwd.dtype_bias) = (BiasKind::Elementwise, DType::Bf16);
        }),
        ("128_everything_f32", 128, MaskKind::Upper, |spec| {
            (spec.fwd.bias, spec.fwd.dropout, spec.fwd.softcap) = (BiasKind::Alibi, true, true);
            spec.dtype_grad = DType::F32;
        }),
        ("128_group", 128, MaskKind::Upper, |spec| {
            (spec.fwd.q_layout, spec.fwd.kv_layout) = (QLayout::Packed, KvKind::Packed);
        }),
        ("96_upper", 96, MaskKind::Upper, |_| {}),
        ("64x192_upper", 64, MaskKind::Upper, |spec| spec.fwd.head_dim_v = 192),
        ("128_v_columns", 128, MaskKind::Upper, |spec| spec.fwd.v_layout = VLayout::ColMajor),
        ("192x128_upper", 192, MaskKind::Upper, |spec| spec.fwd.head_dim_v = 128),
        ("192_full", 192, MaskKind::Full, |_| {}),
        ("192_everything_f32", 192, MaskKind::Upper, |spec| {
            (spec.fwd.bias, spec.fwd.dropout, spec.fwd.softcap) = (BiasKind::Alibi, true, true);
            spec.dtype_grad = DType::F32;
        }),
        ("256_full", 256, MaskKind::Full, |_| {}),
        ("256_band_f16", 256, MaskKind::Band, |spec| {
            (spec.fwd.dtype_qk, spec.fwd.dtype_v, spec.fwd.dtype_o) = (DType::F16, DType::F16, DType::F16);
            spec.dtype_grad = DType::F16;
        }),
        ("256_everything_f32", 256, MaskKind::Upper, |spec| {
            (spec.fwd.bias, spec.fwd.dropout, spec.fwd.softcap) = (BiasKind::Alibi, true, true);
            spec.dtype_grad = DType::F32;
        }),
        ("256_bias", 256, MaskKind::Upper, |spec| {
            (spec.fwd.bias, spec.fwd.dtype_bias) = (BiasKind::Elementwise, DType::Bf16);
        }),
        ("256_v_columns", 256, MaskKind::Upper, |spec| spec.fwd.v_layout = VLayout::ColMajor),
    ];
    let mut kernels: Vec<_> = cases
        .into_iter()
        .map(|(name, dim, mask, change)| {
            let mut spec = BwdSpec::plain(DType::Bf16, dim, mask);
            change(&mut spec);
            let source = sm100_bwd::main(&spec, &sm100_bwd::default_tile(&spec));
            (format!("sm100_bwd_{name}"), source)
        })
        .collect();
    let upper = BwdSpec::plain(DType::Bf16, 128, MaskKind::Upper);
    kernels.push(("sm100_bwd_finish_dq_128".to_owned(), sm100_bwd::finish_dq(&upper)));
    let upper = BwdSpec::plain(DType::Bf16, 256, MaskKind::Upper);
    kernels.push(("sm100_bwd_finish_dq_256".to_owned(), sm100_bwd::finish_dq(&upper)));
    let ordered = BwdSpec { deterministic: true, ..upper };
    kernels.push((
        "sm100_bwd_256_in_order".to_owned(),
        sm100_bwd::main(&ordered, &sm100_bwd::default_tile(&ordered)),
    ));
    kernels
}

/// Kernels of Hopper's backward: every head dimension's tile, orders of its products, and modifiers.
///
/// Persistent kernels spill some 50 bytes of their loading thread, which has 24 registers.
fn backward_kernels() -> Vec<(String, KernelSource)> {
    let plain = |dim, mask| BwdSpec::plain(DType::Bf16, dim, mask);
    let modified = |dim, change: fn(&mut BwdSpec)| {
        let mut spec = plain(dim, MaskKind::Upper);
        change(&mut spec);
        spec
    };
    let narrow_v = |mut spec: BwdSpec| {
        spec.fwd.head_dim_v = 128;
        spec
    };
    let specs = [
        ("64_full", plain(64, MaskKind::Full)),
        ("128_upper", plain(128, MaskKind::Upper)),
        ("256_upper", plain(256, MaskKind::Upper)),
        ("192_upper", plain(192, MaskKind::Upper)),
        ("64_bias", modified(64, |spec| spec.fwd.bias = BiasKind::Elementwise)),
        ("64_upper", plain(64, MaskKind::Upper)),
        ("128_full", plain(128, MaskKind::Full)),
        ("256_full", plain(256, MaskKind::Full)),
        ("64_softcap", modified(64, |spec| spec.fwd.softcap = true)),
        ("64_dropout", modified(64, |spec| spec.fwd.dropout = true)),
        ("128_softcap", modified(128, |spec| spec.fwd.softcap = true)),
        ("128_alibi", modified(128, |spec| spec.fwd.bias = BiasKind::Alibi)),
        ("128_bias", modified(128, |spec| spec.fwd.bias = BiasKind::Elementwise)),
        ("128_dropout", modified(128, |spec| spec.fwd.dropout = true)),
        ("128_softcap_dropout", modified(128, |spec| (spec.fwd.softcap, spec.fwd.dropout) = (true, true))),
        ("64_deterministic", modified(64, |spec| spec.deterministic = true)),
        ("128_deterministic", modified(128, |spec| spec.deterministic = true)),
        ("192_128_full", narrow_v(plain(192, MaskKind::Full))),
        ("192_128_upper", narrow_v(plain(192, MaskKind::Upper))),
        ("192_128_bias", narrow_v(modified(192, |spec| spec.fwd.bias = BiasKind::Elementwise))),
        ("192_128_dropout", narrow_v(modified(192, |spec| spec.fwd.dropout = true))),
        ("192_128_deterministic", narrow_v(modified(192, |spec| spec.deterministic = true))),
        ("192_deterministic", modified(192, |spec| spec.deterministic = true)),
        ("256_deterministic", modified(256, |spec| spec.deterministic = true)),
        // In this tile, which divides the head dimension, ptxas serialises the products of clusters.
        ("232_dropout_in_order", {
            let mut spec = plain(232, MaskKind::Full);
            (spec.fwd.dropout, spec.deterministic) = (true, true);
            spec
        }),
    ];
    let mut kernels: Vec<_> = specs
        .into_iter()
        .map(|(name, spec)| {
            (format!("sm90_bwd_{name}"), sm90_bwd::main(&spec, &sm90_bwd::default_tile(&spec)))
        })
        .collect();
    let dbias = |spec: &mut BwdSpec| (spec.fwd.bias, spec.write_dbias) = (BiasKind::Elementwise, true);
    for dim in [64, 128, 192, 256] {
        let spec = modified(dim, dbias);
        let tile = sm90_bwd::default_tile(&spec);
        kernels.push((format!("sm90_bwd_{dim}_dbias_kernel"), sm90_bwd::dbias(&spec, &tile.of_dbias())));
        kernels.push((format!("sm90_bwd_{dim}_postprocess"), sm90_bwd::postprocess(&spec, &tile)));
        let shared = sm90_bwd::Sm90BwdTile {
            head_parts: true,
            ..sm90_bwd::default_tile(&plain(dim, MaskKind::Upper))
        };
        let spec = plain(dim, MaskKind::Upper);
        kernels.push((format!("sm90_bwd_{dim}_head_parts"), sm90_bwd::main(&spec, &shared)));
        kernels.push((format!("sm90_bwd_{dim}_head_sums"), sm90_bwd::head_sums(&spec, &shared)));
        let masked = plain(dim, MaskKind::Upper);
        let tile = sm90_bwd::default_tile(&masked);
        kernels.push((format!("sm90_bwd_{dim}_repair"), sm90_bwd::repair(&masked, &tile)));
        if dim <= 128 {
            kernels.push((format!("sm90_bwd_{dim}_masks"), sm90_bwd::masked_main(&masked, &tile, false)));
            let ordered = BwdSpec { deterministic: true, ..masked };
            let in_order = sm90_bwd::masked_main(&ordered, &sm90_bwd::default_tile(&ordered), false);
            kernels.push((format!("sm90_bwd_{dim}_masks_ordered"), in_order));
            let repair = sm90_bwd::masked_repair(&masked, &tile, false);
            kernels.push((format!("sm90_bwd_{dim}_masks_repair"), repair));
        }
    }
    // Delta is computed beside the products, with the registers that the table gives to warps beside the consumers.
    let dropout = modified(128, |spec| spec.fwd.dropout = true);
    for (name, spec, load_registers) in [
        ("64_upper", plain(64, MaskKind::Upper), 40),
        ("128_upper", plain(128, MaskKind::Upper), 40),
        ("128_full", plain(128, MaskKind::Full), 40),
        ("128_dropout", dropout, 24),
    ] {
        let tile = sm90_bwd::default_tile(&spec);
        let delta =
            sm90_bwd::Sm90BwdTile { dq_finish: sm90_bwd::DqFinish::BesideWithDelta, load_registers, ..tile };
        kernels.push((format!("sm90_bwd_{name}_delta"), sm90_bwd::main(&spec, &delta)));
        let tile = sm90_bwd::Sm90BwdTile { load_registers: 40, ..tile };
        kernels.push((format!("sm90_bwd_{name}_40_registers"), sm90_bwd::main(&spec, &tile)));
    }
    // Kernels for short sequences, where a cluster's second CTA would have no work.
    for (name, spec) in [("full", plain(256, MaskKind::Full)), ("upper", plain(256, MaskKind::Upper))] {
        let tile = sm90_bwd::default_tile(&spec);
        let tile = sm90_bwd::Sm90BwdTile { walk: sm90_bwd::BwdWalk::SplitDims, ..tile };
        kernels.push((format!("sm90_bwd_256_{name}_split_dims"), sm90_bwd::main(&spec, &tile)));
    }
    kernels
}

/// Kernels of mma.sync, with an A100's tiles and, for wide head dimensions, an RTX 4090's. None spills or has a stack,
/// where an array outside of registers would lie without counting as a spill.
fn mma_sync_kernels() -> Vec<(String, KernelSource)> {
    let (a100, ada) =
        (Room { smem_bytes: 166_912, num_sms: 108 }, Room { smem_bytes: 101_376, num_sms: 128 });
    let plain = |dim, mask| FwdSpec::plain(DType::Bf16, dim, mask);
    let upper = plain(128, MaskKind::Upper);
    let specs = [
        ("128_upper", upper),
        ("64_upper", plain(64, MaskKind::Upper)),
        ("256_upper", plain(256, MaskKind::Upper)),
        ("128_band", plain(128, MaskKind::Band)),
        ("128_bias", FwdSpec { bias: BiasKind::Elementwise, dtype_bias: DType::Bf16, ..upper }),
        ("128_dropout", FwdSpec { dropout: true, ..upper }),
        ("96_full", plain(96, MaskKind::Full)),
        ("128_full", plain(128, MaskKind::Full)),
        ("576x512_upper", FwdSpec { head_dim_v: 512, ..plain(576, MaskKind::Upper) }),
        ("192_upper", plain(192, MaskKind::Upper)),
        ("128_softcap", FwdSpec { softcap: true, ..upper }),
        ("128_alibi", FwdSpec { bias: BiasKind::Alibi, ..upper }),
        ("128_v_columns", FwdSpec { v_layout: VLayout::ColMajor, ..upper }),
        ("128_pages", FwdSpec { kv_layout: KvKind::Paged, ..upper }),
    ];
    let own = |spec: &FwdSpec, room| Sm80Tile { vector_store: true, ..sm80::default_tile(spec, room) };
    let mut kernels: Vec<_> = specs
        .into_iter()
        .map(|(name, spec)| (format!("sm80_{name}"), sm80::fwd(&spec, &own(&spec, a100))))
        .collect();
    let wide = plain(256, MaskKind::Upper);
    kernels.push(("sm80_256_upper_ada".to_owned(), sm80::fwd(&wide, &own(&wide, ada))));
    let decode =
        Sm80Tile { block_m: 16, warps: 1, ctas: 4, pack_gqa: true, split_keys: 256, ..own(&upper, a100) };
    kernels.push(("sm80_128_part_of_keys".to_owned(), sm80::fwd(&split::part_spec(&upper), &decode)));
    let narrow = Sm80Tile { stored: DType::E4m3Fn, ..decode };
    kernels.push(("sm80_128_part_of_fp8_keys".to_owned(), sm80::fwd(&split::part_spec(&upper), &narrow)));
    for (name, dim, change) in [
        ("128_upper", 128, (|_| {}) as fn(&mut BwdSpec)),
        ("256_upper", 256, |_| {}),
        ("128_softcap", 128, |spec| spec.fwd.softcap = true),
        ("128_bias", 128, |spec| {
            (spec.fwd.bias, spec.fwd.dtype_bias) = (BiasKind::Elementwise, DType::Bf16);
            (spec.write_dbias, spec.dtype_dbias) = (true, DType::Bf16);
        }),
    ] {
        let mut spec = BwdSpec::plain(DType::Bf16, dim, MaskKind::Upper);
        change(&mut spec);
        let dims = one_head(dim as u32, dim as u32);
        let mut problem = BwdProblem::new(FwdProblem::batch(DType::Bf16, dims));
        let strides = problem.fwd.strides.q;
        problem.dbias = spec.write_dbias.then_some(BiasGrad { dtype: spec.dtype_dbias, strides });
        let one_pass = sm80_bwd::takes_one_pass(&spec).is_ok();
        let all = one_pass.then(|| sm80_bwd::choose_tiles(&problem, &spec, a100, true));
        let tiles = sm80_bwd::choose_tiles(&problem, &spec, a100, false);
        for tile in tiles.into_iter().chain(all.into_iter().flatten()) {
            kernels.push((format!("{}_{name}", tile.sums.name()), sm80_bwd::main(&spec, &tile)));
        }
    }
    kernels
}

/// FP8 kernels of mma.sync, with an RTX 4090's shared memory.
fn fp8_kernels_of_mma_sync() -> Vec<(String, KernelSource)> {
    let ada = Room { smem_bytes: 101_376, num_sms: 128 };
    let plain = |dtype: DType, dim| FwdSpec {
        dtype_qk: dtype,
        dtype_v: dtype,
        ..FwdSpec::plain(DType::Bf16, dim, MaskKind::Upper)
    };
    let spec = plain(DType::E4m3Fn, 128);
    [
        ("128_upper", spec),
        ("64_upper", plain(DType::E5m2, 64)),
        ("256_upper", plain(DType::E4m3Fn, 256)),
        ("128_v_columns", FwdSpec { v_layout: VLayout::ColMajor, ..spec }),
        ("128_v_bf16", FwdSpec { dtype_v: DType::Bf16, ..spec }),
    ]
    .map(|(name, spec)| {
        let tile = Sm80Tile { vector_store: true, ..sm80::default_tile(&spec, ada) };
        (format!("sm80_fp8_{name}"), sm80::fwd(&spec, &tile))
    })
    .into()
}

/// Kernels of mma.sync that load K and V by TMA, with an RTX 5090's shared memory.
fn tma_kernels_of_mma_sync() -> Vec<(String, KernelSource)> {
    let room = Room { smem_bytes: 101_376, num_sms: 170 };
    [(DType::Bf16, 128), (DType::Bf16, 64), (DType::Bf16, 192), (DType::Bf16, 256), (DType::E4m3Fn, 128)]
        .map(|(dtype, dim)| {
            let dims = one_head(dim, dim);
            let problem = FwdProblem::batch(dtype, dims).dtype_o(DType::Bf16);
            let tile = sm80::choose_tile(&problem, room).by_tma(&problem, room).unwrap();
            (format!("sm80_tma_{dim}_{dtype}"), sm80::fwd(&FwdSpec::of(&problem), &tile))
        })
        .into()
}

/// Kernels of latent attention and of wide heads: whole rows and parts of the keys, contiguous and in pages.
fn latent_kernels() -> Vec<(String, KernelSource)> {
    let wide = |dim, mask| FwdSpec { head_dim_v: 512, ..FwdSpec::plain(DType::Bf16, dim, mask) };
    let plain = |mask| wide(576, mask);
    let (full, upper) = (plain(MaskKind::Full), plain(MaskKind::Upper));
    let paged = FwdSpec { kv_layout: KvKind::Paged, ..upper };
    let part = split::part_spec(&paged);
    let tile = Sm90MlaTile {
        by_tma: true,
        cluster: 1,
        lazy_rescale_log2: 8,
        vector_store: true,
        v_in_k: true,
        stored: DType::Bf16,
        listed: false,
        two_caches: false,
        row_bytes: 0,
        split_keys: 0,
        fold_parts: 1,
        shares: 0,
    };
    let narrow = Sm90MlaTile { by_tma: false, stored: DType::E4m3Fn, ..tile };
    let apart = Sm90MlaTile { v_in_k: false, ..tile };
    let of_512 = wide(512, MaskKind::Upper);
    let in_shares = |tile| Sm90MlaTile { split_keys: 64, shares: 132, ..tile };
    [
        ("full", full, tile),
        ("part_of_pages", part, Sm90MlaTile { split_keys: 64, ..tile }),
        ("upper", upper, tile),
        ("band", plain(MaskKind::Band), tile),
        ("upper_copied", paged, Sm90MlaTile { by_tma: false, ..tile }),
        (
            "upper_f16",
            FwdSpec { dtype_qk: DType::F16, dtype_v: DType::F16, dtype_o: DType::F16, ..upper },
            Sm90MlaTile { stored: DType::F16, ..tile },
        ),
        ("bias", FwdSpec { bias: BiasKind::Elementwise, dtype_bias: DType::Bf16, ..upper }, tile),
        ("upper_apart", upper, apart),
        ("512_upper", of_512, apart),
        (
            "512_band_copied",
            FwdSpec { softcap: true, ..wide(512, MaskKind::Band) },
            Sm90MlaTile { by_tma: false, ..apart },
        ),
        (
            "512_part_of_pages",
            split::part_spec(&FwdSpec { bias: BiasKind::Alibi, kv_layout: KvKind::Paged, ..of_512 }),
            Sm90MlaTile { split_keys: 64, ..apart },
        ),
        ("part_of_fp8", split::part_spec(&upper), Sm90MlaTile { split_keys: 64, ..narrow }),
        ("folded_by_8", split::part_spec(&upper), Sm90MlaTile { split_keys: 64, fold_parts: 8, ..tile }),
        ("folded_by_2_of_pages", part, Sm90MlaTile { split_keys: 64, fold_parts: 2, ..tile }),
        (
            "folded_by_8_of_fp8",
            split::part_spec(&upper),
            Sm90MlaTile { split_keys: 64, fold_parts: 8, ..narrow },
        ),
        (
            "folded_by_4_bias",
            split::part_spec(&FwdSpec { bias: BiasKind::Elementwise, dtype_bias: DType::Bf16, ..upper }),
            Sm90MlaTile { split_keys: 64, fold_parts: 4, ..tile },
        ),
        ("512_upper_fp8", of_512, Sm90MlaTile { v_in_k: false, ..narrow }),
        ("upper_cluster", upper, Sm90MlaTile { cluster: 2, ..tile }),
        ("512_upper_cluster", of_512, Sm90MlaTile { cluster: 2, ..apart }),
        ("320_upper", FwdSpec { head_dim_v: 320, ..wide(320, MaskKind::Upper) }, apart),
        ("shares", split::part_spec(&full), in_shares(tile)),
        ("shares_of_pages", part, in_shares(tile)),
        ("shares_copied", part, in_shares(Sm90MlaTile { by_tma: false, ..tile })),
        (
            "shares_softcap_band",
            split::part_spec(&FwdSpec { softcap: true, ..plain(MaskKind::Band) }),
            in_shares(tile),
        ),
        ("shares_apart", split::part_spec(&upper), in_shares(apart)),
        ("shares_of_fp8", split::part_spec(&upper), in_shares(narrow)),
        ("shares_of_fp8_pages", part, in_shares(narrow)),
    ]
    .map(|(name, spec, tile)| (format!("sm90_mla_{name}"), sm90_mla::fwd(&spec, &tile)))
    .into()
}

/// Kernels of latent attention and of wide heads on Blackwell, by pairs of CTAs.
fn latent_kernels_of_blackwell() -> Vec<(String, KernelSource)> {
    let wide = |dim, mask| FwdSpec { head_dim_v: 512, ..FwdSpec::plain(DType::Bf16, dim, mask) };
    let (upper, band) = (wide(576, MaskKind::Upper), wide(576, MaskKind::Band));
    let paged = FwdSpec { kv_layout: KvKind::Paged, ..upper };
    let tile = Sm100MlaTile {
        by_tma: true,
        box_keys: 64,
        lazy_rescale_log2: 8,
        vector_store: true,
        split_keys: 0,
        listed: false,
        two_caches: false,
        row_bytes: 0,
        stored: DType::Bf16,
    };
    let copied = Sm100MlaTile { by_tma: false, box_keys: 0, ..tile };
    [
        ("full", wide(576, MaskKind::Full), tile),
        ("part_of_pages", split::part_spec(&paged), Sm100MlaTile { split_keys: 128, box_keys: 16, ..tile }),
        ("upper", upper, tile),
        ("band", band, tile),
        ("upper_copied", paged, copied),
        (
            "upper_f16_sink",
            FwdSpec { dtype_qk: DType::F16, dtype_v: DType::F16, dtype_o: DType::F16, sink: true, ..upper },
            Sm100MlaTile { stored: DType::F16, ..tile },
        ),
        ("bias", FwdSpec { bias: BiasKind::Elementwise, dtype_bias: DType::Bf16, ..upper }, tile),
        ("softcap_alibi", FwdSpec { softcap: true, bias: BiasKind::Alibi, ..band }, copied),
        ("512_upper", wide(512, MaskKind::Upper), tile),
        (
            "320_band_elements",
            FwdSpec { head_dim_v: 320, ..wide(320, MaskKind::Band) },
            Sm100MlaTile { vector_store: false, ..tile },
        ),
    ]
    .map(|(name, spec, tile)| (format!("sm100_mla_{name}"), sm100_mla::fwd(&spec, &tile)))
    .into_iter()
    .chain(blackwell_list_kernels())
    .collect()
}

fn latent_table_of_blackwell(arch: &str) -> &'static str {
    match arch {
        "sm_103a" => "resources_sm103_mla.txt",
        "sm_110a" => "resources_sm110_mla.txt",
        _ => "resources_sm100_mla.txt",
    }
}

#[test]
fn a_sample_of_kernels_of_latent_attention_compiles_in_the_registers_of_the_table_without_spills() {
    as_in_the_table("sm_90a", "resources_mla.txt", latent_kernels(), SAMPLE);
    for arch in sm100::ARCHS {
        as_in_the_table(arch, latent_table_of_blackwell(arch), latent_kernels_of_blackwell(), SAMPLE);
    }
}

#[test]
#[ignore = "every kernel of the table is compiled: cargo xtask test --all"]
fn every_kernel_of_latent_attention_compiles_in_the_registers_of_the_table_without_spills() {
    as_in_the_table("sm_90a", "resources_mla.txt", latent_kernels(), 1);
    for arch in sm100::ARCHS {
        as_in_the_table(arch, latent_table_of_blackwell(arch), latent_kernels_of_blackwell(), 1);
    }
}

#[test]
fn a_sample_of_kernels_of_mma_sync_compiles_in_the_registers_of_the_table_without_spills() {
    as_in_the_table("sm_80", "resources_sm80.txt", mma_sync_kernels(), SAMPLE);
    as_in_the_table("sm_89", "resources_sm89.txt", fp8_kernels_of_mma_sync(), SAMPLE);
    as_in_the_table("sm_120a", "resources_sm120.txt", tma_kernels_of_mma_sync(), SAMPLE);
}

#[test]
#[ignore = "every kernel of the table is compiled: cargo xtask test --all"]
fn every_kernel_of_mma_sync_compiles_in_the_registers_of_the_table_without_spills() {
    as_in_the_table("sm_80", "resources_sm80.txt", mma_sync_kernels(), 1);
    as_in_the_table("sm_89", "resources_sm89.txt", fp8_kernels_of_mma_sync(), 1);
    as_in_the_table("sm_120a", "resources_sm120.txt", tma_kernels_of_mma_sync(), 1);
}

/// One kernel in this many is compiled, from the first on, since ptxas needs seconds for each.
const SAMPLE: usize = 18;

#[test]
fn a_sample_of_kernels_compiles_in_the_registers_of_the_table_without_spills() {
    as_in_the_table("sm_90a", "resources.txt", kernels(), SAMPLE);
}

#[test]
fn a_sample_of_blackwell_s_kernels_compiles_in_the_registers_of_the_table_without_spills() {
    for arch in sm100::ARCHS {
        as_in_the_table(arch, table_of_blackwell(arch), blackwell_kernels(arch), SAMPLE);
    }
}

#[test]
fn a_sample_of_blackwell_s_kernels_over_mxfp8_compiles_in_the_registers_of_the_table_without_spills() {
    for arch in sm100::ARCHS {
        as_in_the_table(arch, "resources_mxfp8.txt", scaled_kernels(arch), SAMPLE);
    }
}

#[test]
#[ignore = "every kernel of the table is compiled: cargo xtask test --all"]
fn every_blackwell_kernel_over_mxfp8_compiles_in_the_registers_of_the_table_without_spills() {
    for arch in sm100::ARCHS {
        as_in_the_table(arch, "resources_mxfp8.txt", scaled_kernels(arch), 1);
    }
}

#[test]
fn a_sample_of_kernels_over_caches_compiles_in_the_registers_of_the_table_without_spills() {
    as_in_the_table("sm_90a", "resources_caches.txt", caches(), SAMPLE);
}

#[test]
#[ignore = "every kernel of the table is compiled: cargo xtask test --all"]
fn every_kernel_over_caches_compiles_in_the_registers_of_the_table_without_spills() {
    as_in_the_table("sm_90a", "resources_caches.txt", caches(), 1);
}

#[test]
fn a_sample_of_backward_kernels_compiles_in_the_registers_of_the_table() {
    as_in_the_table("sm_90a", "resources_bwd.txt", backward_kernels(), SAMPLE);
}

#[test]
#[ignore = "every kernel of the table is compiled: cargo xtask test --all"]
fn every_backward_kernel_compiles_in_the_registers_of_the_table() {
    as_in_the_table("sm_90a", "resources_bwd.txt", backward_kernels(), 1);
}

#[test]
#[ignore = "every kernel of the table is compiled: cargo xtask test --all"]
fn every_hopper_kernel_compiles_in_the_registers_of_the_table_without_spills() {
    as_in_the_table("sm_90a", "resources.txt", kernels(), 1);
}

#[test]
#[ignore = "every kernel of the table is compiled: cargo xtask test --all"]
fn every_blackwell_kernel_compiles_in_the_registers_of_the_table_without_spills() {
    for arch in sm100::ARCHS {
        as_in_the_table(arch, table_of_blackwell(arch), blackwell_kernels(arch), 1);
    }
}

/// Table of an architecture: compilers allocate registers differently for each.
fn table_of_blackwell(arch: &str) -> &'static str {
    match arch {
        "sm_103a" => "resources_sm103.txt",
        "sm_110a" => "resources_sm110.txt",
        _ => "resources_sm100.txt",
    }
}

/// Sizes of a call with one sequence of 1024 tokens and one head.
fn one_head(head_dim_qk: u32, head_dim_v: u32) -> Dims {
    let (batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv) = (1, 1024, 1024, 1, 1);
    Dims { batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim_qk, head_dim_v }
}

/// NVRTC, and the library of its built-in functions, which NVRTC finds only if it is loaded already.
fn nvrtc() -> Option<(Option<Library>, Library)> {
    let path = fmha_core::env::NVRTC.get().unwrap().unwrap_or_else(|| "libnvrtc.so.13".to_owned());
    let folder = std::path::Path::new(&path).parent().and_then(|folder| folder.read_dir().ok());
    let named = |file: &std::path::PathBuf| file.to_string_lossy().contains("libnvrtc-builtins.so");
    let builtins = folder.into_iter().flatten().flatten().map(|entry| entry.path()).find(named);
    let builtins = builtins.unwrap_or_else(|| "libnvrtc-builtins.so".into());
    // SAFETY: NVIDIA's libraries run no code of consequence when they are loaded.
    let (builtins, nvrtc) = unsafe { (Library::new(builtins), Library::new(&path)) };
    if nvrtc.is_err() {
        eprintln!("absent: NVRTC ({path}), so no kernel was compiled");
    }
    nvrtc.ok().map(|nvrtc| (builtins.ok(), nvrtc))
}

/// Version of the NVRTC for which the tables list registers (xtask/src/setup.rs). For other versions only spills are
/// checked.
const OF_THE_TABLES: [c_int; 2] = [13, 0];

/// Version of the compiler, and whether it compiles for an architecture.
fn version_and_whether_it_knows(nvrtc: &Library, arch: &str) -> ([c_int; 2], bool) {
    type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    type Numbers = unsafe extern "C" fn(*mut c_int) -> c_int;
    let [mut major, mut minor, mut count] = [0; 3];
    // SAFETY: the signatures are those of nvrtc.h; the list has as many entries as NVRTC reports.
    let archs = unsafe {
        nvrtc.get::<Version>(b"nvrtcVersion").unwrap()(&raw mut major, &raw mut minor);
        nvrtc.get::<Numbers>(b"nvrtcGetNumSupportedArchs").unwrap()(&raw mut count);
        let mut archs = vec![0; count.max(1) as usize];
        nvrtc.get::<Numbers>(b"nvrtcGetSupportedArchs").unwrap()(archs.as_mut_ptr());
        archs
    };
    let number = arch.trim_start_matches("sm_").trim_end_matches('a').parse::<c_int>().unwrap();
    ([major, minor], archs.contains(&number))
}

/// Compares the spills of another compiler version with `resources_spills.txt`, which lists every exception.
fn spills_as_listed(
    nvrtc: &Library,
    [major, minor]: [c_int; 2],
    arch: &str,
    kernels: Vec<(String, KernelSource)>,
    every: usize,
) {
    let all = include_str!("resources_spills.txt");
    for (name, source) in kernels.into_iter().step_by(every) {
        // CUDA 12.9's PTX is the first that has `.block32` and `.block16` of block-scaled products.
        let is_scaled = name.ends_with("_mxfp8") || name.ends_with("_nvfp4");
        if is_scaled && [major, minor] < [12, 9] {
            eprintln!("absent: NVRTC {major}.{minor} does not compile {name}");
            continue;
        }
        let log =
            compile(nvrtc, &source, arch).unwrap_or_else(|log| panic!("{name} does not compile:\n{log}"));
        let spills = number_before(&log, " bytes spill stores") + number_before(&log, " bytes spill loads");
        let line = format!("{major}.{minor} {arch} {name} {spills}");
        println!("{line}");
        assert!(spills == 0 || all.lines().any(|listed| listed == line), "{line} is not listed");
    }
}

/// Compares kernels with a table of this folder. With the variable `BLESS` a complete run writes the table.
fn as_in_the_table(arch: &str, table: &str, kernels: Vec<(String, KernelSource)>, every: usize) {
    let Some((_builtins, nvrtc)) = nvrtc() else { return };
    let (version, knows) = version_and_whether_it_knows(&nvrtc, arch);
    if version != OF_THE_TABLES {
        if !knows {
            return eprintln!("absent: NVRTC {version:?} compiles nothing for {arch}");
        }
        return spills_as_listed(&nvrtc, version, arch, kernels, every);
    }
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(table);
    let table = std::fs::read_to_string(&path).unwrap();
    let writes = every == 1 && std::env::var_os("BLESS").is_some();
    let expected: String = table.lines().step_by(every).map(|line| format!("{line}\n")).collect();
    assert!(writes || table.lines().count() == kernels.len(), "{arch}: the table has not a line a kernel");
    let mut found = String::new();
    for (name, source) in kernels.into_iter().step_by(every) {
        let log =
            compile(&nvrtc, &source, arch).unwrap_or_else(|log| panic!("{name} does not compile:\n{log}"));
        // ptxas reports a serialised wgmma by these codes, without the word "warning".
        for warning in ["warning", "C7508", "C7510", "C7512", "C7514", "C7520"] {
            assert!(!log.contains(warning), "{name}: {log}");
        }
        let registers = number_before(&log, " registers");
        let spills = number_before(&log, " bytes spill stores") + number_before(&log, " bytes spill loads");
        let stack = number_before(&log, " bytes stack frame");
        found +=
            &format!("{name:28} {registers:4} registers {spills:4} bytes spilled {stack:4} bytes of stack\n");
    }
    if writes {
        return std::fs::write(path, found).unwrap();
    }
    assert_eq!(found, expected, "the table as compiled now:\n{found}");
}

/// Kernels over lists of keys, in the tiles for this many heads of a token: latent rows, and head dimension 128.
fn list_kernels(room: Room) -> Vec<(String, KernelSource)> {
    let mut kernels = Vec::new();
    for (heads, heads_kv, dim_qk, dim_v) in [(128, 1, 576, 512), (16, 1, 576, 512), (64, 4, 128, 128)] {
        let dims = Dims::batch(1).seqlens(4096, 65536).heads(heads, heads_kv).head_dims(dim_qk, dim_v);
        let plain = FwdProblem::batch(DType::Bf16, dims);
        let lists = KeyLists::new(&plain, 2048);
        let mut problem = plain.lists(lists);
        let backward = BwdProblem::new(problem.clone());
        if dim_qk != dim_v {
            (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        }
        let (spec, tile) = (FwdSpec::of(&problem), sm80::choose_tile(&problem, room));
        let name = format!("{dim_qk}_{dim_v}_h{heads}");
        kernels.push((format!("fwd_{name}"), sm80::fwd_lists(&spec, &tile)));
        let part = Sm80Tile { split_keys: 512, fixed_parts: true, ..tile };
        kernels.push((format!("part_{name}"), sm80::fwd_lists(&split::part_spec(&spec), &part)));
        let spec = BwdSpec::of(&backward);
        for ordered in [false, true] {
            let tile = sm80_lists_bwd::choose_tile(&backward, &spec, room, ordered);
            kernels.push((format!("bwd_{name}_{ordered}"), sm80_lists_bwd::main(&spec, &tile)));
            if ordered {
                kernels.push((format!("keys_{name}"), sm80_lists_bwd::keys(&spec, &tile)));
            }
        }
    }
    kernels
}

/// Kernels that unite the lists of blocks of several tokens, under a causal mask.
fn uniting_kernels(room: Room) -> Vec<(String, KernelSource)> {
    let kernel = |(dim, ratio, size): (u32, u32, u32)| {
        let dims = Dims {
            batch: 1,
            seqlen_q: 4096,
            seqlen_k: 65536,
            num_heads_q: 4 * ratio,
            num_heads_kv: 4,
            head_dim_qk: dim,
            head_dim_v: dim,
        };
        let plain = FwdProblem::batch(DType::Bf16, dims).mask("b".parse().unwrap());
        let lists = KeyLists::new(&plain, 16).entries(ListEntries::Blocks { size });
        let problem = plain.lists(lists);
        let tile = sm80::united_tile(&problem, room).unwrap();
        (format!("union_{dim}_r{ratio}_b{size}"), sm80::fwd_lists(&FwdSpec::of(&problem), &tile))
    };
    [(128, 16, 64), (128, 4, 16), (64, 8, 128), (192, 16, 64), (256, 16, 64)].map(kernel).into()
}

#[test]
fn a_kernel_that_unites_lists_compiles_without_spills() {
    lists_do_not_spill("sm_80", uniting_kernels(LISTS_A100), 5);
}

#[test]
#[ignore = "a minute: cargo xtask test --all"]
fn every_kernel_that_unites_lists_compiles_without_spills() {
    lists_do_not_spill("sm_80", uniting_kernels(LISTS_A100), 1);
    lists_do_not_spill("sm_90a", uniting_kernels(LISTS_H200), 1);
}

/// Kernels of Hopper over lists of keys: latent rows with and without a chunk for P, V apart, rows of pages, parts.
fn hopper_list_kernels() -> Vec<(String, KernelSource)> {
    let wide = |dim| FwdSpec { head_dim_v: 512, ..FwdSpec::plain(DType::Bf16, dim, MaskKind::Full) };
    let tile = Sm90MlaTile {
        by_tma: false,
        cluster: 1,
        lazy_rescale_log2: 8,
        vector_store: true,
        v_in_k: true,
        stored: DType::Bf16,
        listed: true,
        two_caches: false,
        row_bytes: 0,
        split_keys: 0,
        fold_parts: 1,
        shares: 0,
    };
    let paged = FwdSpec { kv_layout: KvKind::Paged, sink: true, ..wide(576) };
    let f16 = |spec| FwdSpec { dtype_qk: DType::F16, dtype_v: DType::F16, dtype_o: DType::F16, ..spec };
    [
        ("576_pages", paged, tile),
        ("576", wide(576), tile),
        ("576_part_of_pages", split::part_spec(&paged), Sm90MlaTile { split_keys: 64, ..tile }),
        (
            "576_f16_softcap",
            f16(FwdSpec { softcap: true, ..paged }),
            Sm90MlaTile { stored: DType::F16, ..tile },
        ),
        ("576_f16", f16(paged), Sm90MlaTile { stored: DType::F16, ..tile }),
        ("576_elements", paged, Sm90MlaTile { vector_store: false, ..tile }),
        ("576_exact", paged, Sm90MlaTile { lazy_rescale_log2: 0, ..tile }),
        ("512", wide(512), tile),
        ("512_part", split::part_spec(&wide(512)), Sm90MlaTile { split_keys: 64, ..tile }),
        ("576_apart", paged, Sm90MlaTile { v_in_k: false, ..tile }),
        ("320_apart", FwdSpec { head_dim_v: 320, ..wide(320) }, Sm90MlaTile { v_in_k: false, ..tile }),
        ("576_fp8", paged, Sm90MlaTile { stored: DType::E4m3Fn, ..tile }),
        (
            "512_part_of_fp8",
            split::part_spec(&wide(512)),
            Sm90MlaTile { stored: DType::E4m3Fn, split_keys: 64, ..tile },
        ),
        ("576_fp8_apart", paged, Sm90MlaTile { stored: DType::E4m3Fn, v_in_k: false, ..tile }),
    ]
    .map(|(name, spec, tile)| (format!("sm90_mla_{name}"), sm90_mla::fwd(&spec, &tile)))
    .into()
}

/// Kernels of Blackwell over lists of keys: latent and other rows, gathered by TMA and copied, in parts, from FP8.
fn blackwell_list_kernels() -> Vec<(String, KernelSource)> {
    let wide = |dim| FwdSpec { head_dim_v: 512, ..FwdSpec::plain(DType::Bf16, dim, MaskKind::Full) };
    let tile = Sm100MlaTile {
        by_tma: true,
        box_keys: 1,
        lazy_rescale_log2: 8,
        vector_store: true,
        split_keys: 0,
        listed: true,
        two_caches: false,
        row_bytes: 0,
        stored: DType::Bf16,
    };
    let copied = Sm100MlaTile { by_tma: false, box_keys: 0, ..tile };
    let fp8 = Sm100MlaTile { stored: DType::E4m3Fn, ..copied };
    let bytes = |row_bytes, two_caches| Sm100MlaTile { row_bytes, two_caches, ..fp8 };
    let paged = FwdSpec { kv_layout: KvKind::Paged, sink: true, ..wide(576) };
    let short = FwdSpec { head_dim_qk: 512, ..paged };
    let f16 = FwdSpec { dtype_qk: DType::F16, dtype_v: DType::F16, dtype_o: DType::F16, ..paged };
    [
        ("576_pages", paged, tile),
        ("512", wide(512), tile),
        ("320", FwdSpec { head_dim_v: 320, ..wide(320) }, tile),
        ("576_part_of_pages", split::part_spec(&paged), Sm100MlaTile { split_keys: 128, ..tile }),
        ("576_f16_softcap", FwdSpec { softcap: true, ..f16 }, Sm100MlaTile { stored: DType::F16, ..tile }),
        ("576_copied", paged, copied),
        ("576_fp8", paged, fp8),
        ("576_part_of_fp8", split::part_spec(&paged), Sm100MlaTile { split_keys: 128, ..fp8 }),
        ("576", wide(576), tile),
        ("576_bytes", paged, bytes(656, false)),
        ("512_bytes", short, bytes(584, false)),
        ("576_two_of_bytes", paged, bytes(656, true)),
        (
            "512_part_of_two_of_bytes",
            split::part_spec(&short),
            Sm100MlaTile { split_keys: 128, ..bytes(584, true) },
        ),
        ("576_two", FwdSpec { softcap: true, ..paged }, Sm100MlaTile { two_caches: true, ..copied }),
    ]
    .map(|(name, spec, tile)| (format!("sm100_mla_list_{name}"), sm100_mla::fwd(&spec, &tile)))
    .into()
}

/// Kernels of Hopper's backward over lists of keys: rows of 576 and of 512 elements, gradients in f32.
fn hopper_list_gradients() -> Vec<(String, KernelSource)> {
    let mut kernels = Vec::new();
    for (name, dim_qk, dtype, dtype_grad) in [
        ("576", 576, DType::Bf16, DType::Bf16),
        ("512", 512, DType::Bf16, DType::Bf16),
        ("576_f16", 576, DType::F16, DType::F16),
        ("576_f32", 576, DType::Bf16, DType::F32),
    ] {
        let dims = Dims::batch(1).seqlens(4096, 65536).heads(128, 1).head_dims(dim_qk, 512);
        let plain = FwdProblem::batch(dtype, dims);
        let lists = KeyLists::new(&plain, 2048);
        let problem = BwdProblem::new(plain.lists(lists)).dtype_grad(dtype_grad);
        kernels.push((format!("sm90_lists_{name}"), sm90_lists_bwd::main(&BwdSpec::of(&problem))));
    }
    kernels
}

/// Kernels over two caches, the second with a list: latent rows and head dimension 128, whole and in parts.
fn two_cache_kernels(room: Room, is_hopper: bool) -> Vec<(String, KernelSource)> {
    let mut kernels = Vec::new();
    for (heads, heads_kv, dim_qk, dim_v) in
        [(128, 1, 512, 512), (128, 1, 576, 512), (16, 1, 576, 512), (64, 4, 128, 128)]
    {
        let dims = Dims::batch(1).seqlens(4096, 65536).heads(heads, heads_kv).head_dims(dim_qk, dim_v);
        let mut problem = FwdProblem::batch(DType::Bf16, dims).sink(true);
        if heads_kv == 1 {
            (problem.cache.v_in_k, problem.strides.v) = (true, problem.strides.k);
        }
        let second = SecondCache::new(&problem, KvLayout::Paged { page_size: 64 }, 16384);
        let lists = KeyLists::new(&second.alone(&problem), 512);
        let problem = problem.mask("b:127,0".parse().unwrap()).second(second.lists(lists));
        let name = format!("two_{dim_qk}_{dim_v}_h{heads}");
        if is_hopper && dim_v == 512 {
            let (spec, tile) = (FwdSpec::of(&problem), sm90_mla::choose_tile(&problem, room.num_sms));
            let spec = FwdSpec { mask: MaskKind::Full, sink_columns: false, ..spec };
            kernels.push((format!("mla_{name}"), sm90_mla::fwd(&spec, &tile)));
            let part = Sm90MlaTile { split_keys: 64, vector_store: true, ..tile };
            kernels.push((format!("mla_part_{name}"), sm90_mla::fwd(&split::part_spec(&spec), &part)));
        }
        let (spec, tile) = (FwdSpec::of(&problem), sm80::choose_tile(&problem, room));
        let spec = FwdSpec { mask: MaskKind::Full, sink_columns: false, ..spec };
        kernels.push((format!("fwd_{name}"), sm80::fwd_two_caches(&spec, &tile)));
        let part = Sm80Tile { split_keys: 512, fixed_parts: true, ..tile };
        kernels.push((format!("part_{name}"), sm80::fwd_two_caches(&split::part_spec(&spec), &part)));
    }
    kernels
}

/// Kernels over caches of rows of bytes: lists of one cache and of two, whole and in parts.
fn kernels_of_rows_of_bytes(room: Room, is_hopper: bool) -> Vec<(String, KernelSource)> {
    let mut kernels = Vec::new();
    for (rows, heads, two) in [
        (CacheRows::Bytes656, 128, false),
        (CacheRows::Bytes584, 64, true),
        (CacheRows::Bytes584, 128, false),
        (CacheRows::Bytes656, 16, true),
    ] {
        let dims = Dims::batch(1)
            .seqlens(4096, 65536)
            .heads(heads, 1)
            .head_dims(rows.head_dim_qk(), CacheRows::HEAD_DIM_V);
        let layout = KvLayout::Paged { page_size: 64 };
        let mut problem = FwdProblem::new(QLayout::Batch, layout, DType::Bf16, dims).sink(true);
        problem = problem.v_in_k(true).cache_rows(rows);
        let lists = KeyLists::new(&problem, 2048);
        problem = problem.lists(lists);
        if two {
            let second = SecondCache::new(&problem, layout, 16384);
            let lists = KeyLists::new(&second.alone(&problem), 512);
            problem = problem.second(second.lists(lists));
        }
        let name = format!("b{}_h{heads}{}", rows.row_bytes(), if two { "_two" } else { "" });
        let spec = FwdSpec::of(&problem);
        let part = split::part_spec(&spec);
        if is_hopper {
            let tile = sm90_mla::choose_tile(&problem, room.num_sms);
            kernels.push((format!("mla_{name}"), sm90_mla::fwd(&spec, &tile)));
            let tile = Sm90MlaTile { split_keys: 64, vector_store: true, ..tile };
            kernels.push((format!("mla_part_{name}"), sm90_mla::fwd(&part, &tile)));
        }
        let source = if two { sm80::fwd_two_caches } else { sm80::fwd_lists };
        let mut tile = sm80::choose_tile(&problem, room);
        tile.place_blocks(&problem);
        kernels.push((format!("fwd_{name}"), source(&spec, &tile)));
        let tile = Sm80Tile { split_keys: 512, fixed_parts: true, ..tile };
        kernels.push((format!("part_{name}"), source(&part, &tile)));
    }
    kernels
}

fn lists_do_not_spill(arch: &str, kernels: Vec<(String, KernelSource)>, step: usize) {
    let Some((_builtins, nvrtc)) = nvrtc() else { return };
    let mut found = String::new();
    for (name, source) in kernels.into_iter().step_by(step) {
        let log =
            compile(&nvrtc, &source, arch).unwrap_or_else(|log| panic!("{name} does not compile:\n{log}"));
        let registers = number_before(&log, " registers");
        let spills = number_before(&log, " bytes spill stores") + number_before(&log, " bytes spill loads");
        println!("{arch} {name:28} {registers:4} registers {spills:4} bytes spilled");
        for serialised in ["C7508", "C7510", "C7512", "C7514", "C7520"] {
            assert!(!log.contains(serialised), "{name}: {log}");
        }
        if spills > 0 {
            found += &format!("{name}: {spills} bytes\n");
        }
    }
    assert_eq!(found, "", "{arch}: bytes are spilled");
}

/// Shared memory and multiprocessors of an A100, and then of an H200.
const LISTS_A100: Room = Room { smem_bytes: 166_912, num_sms: 108 };
const LISTS_H200: Room = Room { smem_bytes: 232_448, num_sms: 132 };

/// Kernels that score keys for an indexer, and that choose them.
fn choosing_kernels(converts_fp8: bool) -> Vec<(String, KernelSource)> {
    let (fp8, bf16) = (DType::E4m3Fn, DType::Bf16);
    let spec = |dtype_q, dtype_k, num_heads, head_dim, k_scale| IndexSpec {
        dtype_q,
        dtype_k,
        num_heads,
        head_dim,
        k_scale,
        paged: k_scale,
    };
    let tile = |warp_keys, num_threads| sm80_index::IndexTile { num_threads, warp_keys, converts_fp8 };
    let mut kernels: Vec<_> = [
        ("index_64x128_fp8", spec(fp8, fp8, 64, 128, true), 32, 256),
        ("index_64x128_fp8_short", spec(fp8, fp8, 64, 128, true), 32, 128),
        ("index_64x128_bf16", spec(bf16, bf16, 64, 128, false), 32, 256),
        ("index_4x128_bf16_fp8", spec(bf16, fp8, 4, 128, true), 32, 128),
        ("index_32x256_bf16", spec(bf16, bf16, 32, 256, false), 16, 256),
    ]
    .map(|(name, spec, keys, threads)| (name.to_owned(), sm80_index::source(&spec, &tile(keys, threads))))
    .into();
    for step in 0..=5 {
        kernels.push((format!("choose_step_{step}"), rows::source(RowKernel::Choose, &step)));
    }
    kernels
}

/// Hopper's kernels that score keys and that choose them.
fn hopper_choosing_kernels() -> Vec<(String, KernelSource)> {
    let (fp8, bf16) = (DType::E4m3Fn, DType::Bf16);
    let mut kernels = Vec::new();
    for (name, dtype, num_heads, head_dim, paged, fields) in [
        ("64x128_fp8_paged", fp8, 64, 128, true, &[][..]),
        ("64x128_fp8", fp8, 64, 128, false, &[]),
        ("64x128_bf16", bf16, 64, 128, false, &[]),
        ("32x64_bf16", bf16, 32, 64, true, &[]),
        ("64x128_fp8_three", fp8, 64, 128, true, &[("warpgroups", "3"), ("warpgroup_tiles", "2")]),
        ("64x128_fp8_run1", fp8, 64, 128, true, &[("run_tokens", "1")]),
        ("64x128_fp8_run4", fp8, 64, 128, true, &[("run_tokens", "4")]),
        ("64x128_fp8_narrow", fp8, 64, 128, false, &[("warpgroup_tiles", "2")]),
    ] {
        let indexer = Indexer::new(num_heads, head_dim, dtype, dtype, 4096).k_scale(dtype == fp8);
        let indexer = if paged { indexer.paged(64, 64, 64) } else { indexer };
        let fields = fields.iter().map(|&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned()));
        let tile = sm90_index::Sm90IndexTile::of(&indexer, &fields.collect()).unwrap();
        kernels.push((format!("index_{name}"), sm90_index::source(&IndexSpec::of(&indexer), &tile)));
    }
    for (ctas, held) in [(1, 32), (4, 32), (8, 16), (4, 16), (2, 16), (2, 8), (1, 4)] {
        kernels.push((
            format!("choose_cluster_{ctas}_{held}"),
            rows::cluster_choice(&rows::ClusterChoice { ctas, held }),
        ));
    }
    kernels
}

/// One in `step` of the kernels that choose keys.
fn choosing_does_not_spill(step: usize) {
    lists_do_not_spill("sm_80", choosing_kernels(false), step);
    lists_do_not_spill("sm_90a", choosing_kernels(true), step);
    lists_do_not_spill("sm_90a", hopper_choosing_kernels(), step);
}

#[test]
fn a_sample_of_kernels_that_choose_keys_compiles_without_spills() {
    choosing_does_not_spill(4);
}

#[test]
#[ignore = "some forty kernels are compiled: cargo xtask test --all"]
fn every_kernel_that_chooses_keys_compiles_without_spills() {
    choosing_does_not_spill(1);
}

#[test]
fn a_sample_of_kernels_over_lists_compiles_without_spills() {
    lists_do_not_spill("sm_80", list_kernels(LISTS_A100), 10);
    lists_do_not_spill("sm_90a", hopper_list_kernels(), 14);
    lists_do_not_spill("sm_90a", hopper_list_gradients(), 4);
    lists_do_not_spill("sm_80", two_cache_kernels(LISTS_A100, false), 8);
}

#[test]
#[ignore = "minutes: cargo xtask test --all"]
fn every_kernel_over_lists_compiles_without_spills() {
    lists_do_not_spill("sm_80", list_kernels(LISTS_A100), 1);
    lists_do_not_spill("sm_90a", list_kernels(LISTS_H200), 1);
    lists_do_not_spill("sm_90a", hopper_list_kernels(), 1);
    lists_do_not_spill("sm_90a", hopper_list_gradients(), 1);
    lists_do_not_spill("sm_80", two_cache_kernels(LISTS_A100, false), 1);
    lists_do_not_spill("sm_90a", two_cache_kernels(LISTS_H200, true), 1);
}

/// Makes a problem with a score and a mask as code; an empty text means none. They capture `slopes` and `ids`.
fn of_functions(dim: u32, score: &str, mask: &str) -> FwdProblem {
    let dims = Dims::batch(2).seqlens(8192, 8192).heads(16, 16).head_dim(dim);
    let function = |text: &str| (!text.is_empty()).then(|| text.parse().unwrap());
    let captured = [("slopes", score), ("ids", mask)].into_iter().filter(|(name, text)| text.contains(name));
    FwdProblem::batch(DType::Bf16, dims)
        .write_lse(true)
        .captured(captured.map(|(name, _)| CapturedTensor::dense(name, &[16])).collect())
        .score_code(function(score))
        .mask_code(function(mask))
}

/// Compiles one in `step` of the kernels. None may spill.
fn do_not_spill(kernels: Vec<(String, &str, KernelSource)>, step: usize) {
    let Some((_builtins, nvrtc)) = nvrtc() else { return };
    let mut spilling = Vec::new();
    for (name, arch, source) in kernels.into_iter().step_by(step) {
        if !version_and_whether_it_knows(&nvrtc, arch).1 {
            eprintln!("absent: this NVRTC compiles nothing for {arch}");
            continue;
        }
        let log = compile(&nvrtc, &source, arch).unwrap_or_else(|log| panic!("{name}: {log}"));
        let registers = number_before(&log, " registers");
        let spilled = number_before(&log, " bytes spill stores") + number_before(&log, " bytes spill loads");
        println!("{arch} {name} {registers} registers, {spilled} bytes of spills");
        if spilled > 0 {
            spilling.push(format!("{arch} {name}"));
        }
    }
    assert!(spilling.is_empty(), "{spilling:?} spill");
}

/// Kernels with scores and masks as people write them, in the tiles that a plan would choose.
fn kernels_with_functions() -> Vec<(String, &'static str, KernelSource)> {
    const FORMS: [(&str, &str, &str); 5] = [
        ("alibi", "slopes: f32[_]; s + slopes[h] * (k - q)", ""),
        ("softcap", "30 * tanh(s / 30)", ""),
        ("causal", "", "k <= q"),
        ("documents", "", "ids: i32[_]; ids[q] == ids[k]"),
        ("neighbourhood", "", "n: int; abs(q // n - k // n) <= 6 and abs(q % n - k % n) <= 6"),
    ];
    let room = Room { smem_bytes: 166_912, num_sms: 108 };
    let mut kernels = Vec::new();
    for (name, score, mask) in FORMS {
        for dim in [128, 64] {
            let problem = of_functions(dim, score, mask);
            let code = CodeSource { code: &problem.code, gradients: &[] };
            let (spec, tile) = (sm90::spec_of(&problem), sm90::choose_tile(&problem));
            let hopper = match tile_list::serve(&problem) {
                true => sm90::fwd_masked(&spec, &tile, true),
                false => sm90::fwd(&spec, &tile),
            };
            kernels.push((format!("sm90_{dim}_{name}"), "sm_90a", hopper.with_code(&code)));
            if problem.code.mask.is_some() {
                let bits = tile_list::mask_bits(&spec, 256).with_code(&code);
                kernels.push((format!("mask_bits_{dim}_{name}"), "sm_90a", bits));
            }
            let spec = FwdSpec::of(&problem);
            let tile = Sm80Tile { vector_store: true, ..sm80::default_tile(&spec, room) };
            kernels.push((format!("sm80_{dim}_{name}"), "sm_80", sm80::fwd(&spec, &tile).with_code(&code)));
            let bwd = BwdProblem::new(problem.clone());
            let spec = BwdSpec::of(&bwd);
            for tile in sm80_bwd::choose_tiles(&bwd, &spec, room, false) {
                let source = sm80_bwd::main(&spec, &tile).with_code(&code);
                kernels.push((format!("{}_{dim}_{name}", tile.sums.name()), "sm_80", source));
            }
        }
    }
    kernels
}

#[test]
fn a_sample_of_kernels_with_functions_compiles_without_spills() {
    do_not_spill(kernels_with_functions(), 11);
}

#[test]
#[ignore = "some thirty kernels are compiled: cargo xtask test --all"]
fn every_kernel_with_functions_compiles_without_spills() {
    do_not_spill(kernels_with_functions(), 1);
}

/// Kernels of Blackwell under masks as data and functions, forward and backward, in the tiles that a plan would choose.
fn masked_kernels_of_blackwell(arch: &str) -> Vec<(String, KernelSource)> {
    // Forms of functions: a name, a score, a mask, and whether there are intervals too.
    const FORMS: [(&str, &str, &str, bool); 6] = [
        ("intervals", "", "", true),
        ("causal", "", "k <= q", false),
        ("documents", "", "ids: i32[_]; ids[q] == ids[k]", true),
        ("alibi", "slopes: f32[_]; s + slopes[h] * (k - q)", "", false),
        ("softcap", "30 * tanh(s / 30)", "k <= q", false),
        ("alibi_intervals", "slopes: f32[_]; s + slopes[h] * (k - q)", "", true),
    ];
    let mut kernels = Vec::new();
    for dim in [128, 64, 256] {
        for (name, score, mask, has_intervals) in FORMS {
            let mut problem = of_functions(dim, score, mask);
            if has_intervals {
                let axes = MaskAxes { per_batch: true, heads: 1 };
                problem.masks.intervals = Some(Intervals::batch(&problem, axes, 4));
            }
            let code = CodeSource { code: &problem.code, gradients: &[] };
            let has_function = problem.code.mask.is_some();
            let (spec, tile) = (sm100::spec_of(&problem), sm100::choose_tile(&problem, arch, 148));
            let fwd = match tile_list::serve(&problem) {
                true => sm100::fwd_masked(&spec, &tile, has_function),
                false => sm100::fwd(&spec, &tile),
            };
            kernels.push((format!("sm100_{dim}_{name}"), fwd.with_code(&code)));
            let bwd = BwdProblem::new(problem.clone());
            if sm100_bwd::accepts(&bwd).is_err() {
                continue;
            }
            let spec = sm90_bwd::masked_spec(&bwd);
            let tile = sm100_bwd::choose_tile(&bwd, &spec);
            let main = match tile_list::serve(&problem) {
                true => sm100_bwd::masked_main(&spec, &tile, has_function),
                false => sm100_bwd::main(&spec, &tile),
            };
            kernels.push((format!("sm100_bwd_{dim}_{name}"), main.with_code(&code)));
        }
    }
    kernels
}

fn under_masks_blackwell_does_not_spill(step: usize) {
    for arch in sm100::ARCHS {
        let kernels = masked_kernels_of_blackwell(arch).into_iter();
        do_not_spill(kernels.map(|(name, source)| (name, arch, source)).collect(), step);
    }
}

#[test]
fn a_sample_of_blackwell_s_kernels_under_masks_compiles_without_spills() {
    under_masks_blackwell_does_not_spill(30);
}

#[test]
#[ignore = "sixty kernels are compiled: cargo xtask test --all"]
fn every_blackwell_kernel_under_masks_compiles_without_spills() {
    under_masks_blackwell_does_not_spill(1);
}

/// One in `step` of the kernels over rows of bytes.
fn rows_of_bytes_do_not_spill(step: usize) {
    lists_do_not_spill("sm_80", kernels_of_rows_of_bytes(LISTS_A100, false), step);
    lists_do_not_spill("sm_90a", kernels_of_rows_of_bytes(LISTS_H200, true), step);
}

#[test]
fn a_sample_of_kernels_over_rows_of_bytes_compiles_without_spills() {
    rows_of_bytes_do_not_spill(5);
}

#[test]
#[ignore = "minutes: cargo xtask test --all"]
fn every_kernel_over_rows_of_bytes_compiles_without_spills() {
    rows_of_bytes_do_not_spill(1);
}
