//! Renders kernels for inspection, and for the check of registers by `bench/nvrtc.py`: one folder a kernel, with its
//! entry, its headers and `meta.txt`. Reads lines `NAME field=value ...` from standard input; what is not named has its
//! default. `kernel=` is `sm90`, `sm90_mla`, `sm80`, `sm100` (over MXFP8 with `scales=mxfp8`), `sm100_mla`, or of
//! Hopper's backward `main`, `preprocess`, `postprocess`, `head_sums`, `repair` or `dbias`; other fields are those of
//! the spec and of that kernel's tile. `stored=` is the type of a narrower cache.
//!
//! `echo 'd128 dtype=bf16 dim=128 mask=Upper block_n=128' | cargo run --example render -- out`

use std::error::Error;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use fmha_core::fields::Fields as _;
use fmha_core::source::KernelSource;
use fmha_core::spec::{BiasKind, BwdSpec, KvKind};
use fmha_core::{DType, MaskKind, QLayout, VLayout};
use fmha_kernels_cuda::sm80::{self, Room};
use fmha_kernels_cuda::sm90_mla::{self, Sm90MlaTile};
use fmha_kernels_cuda::sm100_mla::{self, Sm100MlaTile};
use fmha_kernels_cuda::{sm90, sm90_bwd, sm100};

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(std::env::args().nth(1).ok_or("usage: render FOLDER < kernels.txt")?);
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let name = words.next().ok_or("a line has no name")?;
        let (source, meta) = rendered(words).map_err(|why| format!("{name}: {why}"))?;
        write(&out.join(name), &source, &meta)?;
    }
    Ok(())
}

/// The text of a line's kernel, and its `meta.txt`.
fn rendered<'a>(words: impl Iterator<Item = &'a str>) -> Result<(KernelSource, String), Box<dyn Error>> {
    let mut spec = BwdSpec::plain(DType::Bf16, 128, MaskKind::Full);
    let (mut kernel, mut scaled, mut stored, mut of_tile) = ("sm90", false, None, Vec::new());
    for (field, value) in words.filter_map(|word| word.split_once('=')) {
        match field {
            "kernel" => kernel = value,
            "scales" => scaled = value == "mxfp8",
            "stored" => stored = Some(value.parse::<DType>()?),
            _ if set_spec(&mut spec, field, value)? => {}
            _ => of_tile.push((field, value)),
        }
    }
    let fwd = spec.fwd;
    let (source, arch) = match kernel {
        "sm90" => {
            let mut tile = sm90::default_tile(&fwd);
            for (field, value) in of_tile {
                tile.set(field, value)?;
            }
            if fwd.kv_layout == KvKind::Paged && tile.copy_bytes == 0 {
                (tile.page_keys, tile.block_m) = (16, tile.block_m.min(128));
            }
            if let Some(stored) = stored {
                tile = tile.over_narrow_cache(stored);
                tile.take_raw_stages(&fwd)?;
            }
            tile.check(&fwd, 2)?;
            (sm90::fwd(&fwd, &tile), "sm_90a")
        }
        "sm90_mla" => {
            let mut tile = Sm90MlaTile {
                two_caches: false,
                row_bytes: 0,
                by_tma: true,
                cluster: 1,
                lazy_rescale_log2: 8,
                vector_store: true,
                v_in_k: (fwd.head_dim_qk, fwd.head_dim_v) == (576, 512),
                stored: stored.unwrap_or(fwd.dtype_qk),
                listed: false,
                split_keys: 0,
                fold_parts: 1,
                shares: 0,
            };
            for (field, value) in of_tile {
                match field {
                    "v_in_k" => tile.v_in_k = value == "1",
                    _ => tile.set(field, value)?,
                }
            }
            (sm90_mla::fwd(&fwd, &tile), "sm_90a")
        }
        "sm80" => {
            let mut tile = sm80::default_tile(&fwd, Room { smem_bytes: 232_448, num_sms: 132 });
            for (field, value) in of_tile {
                tile.set(field, value)?;
            }
            if let Some(stored) = stored {
                (tile.stored, tile.converts_fp8) = (stored, true);
            }
            tile.check()?;
            (sm80::fwd(&fwd, &tile), "sm_90a")
        }
        "sm100" => {
            let mut tile = sm100::default_tile(&fwd);
            if scaled {
                tile = tile.with_scales(&fwd, 32);
            }
            for (field, value) in of_tile {
                tile.set(field, value)?;
            }
            tile.check(&fwd, 2)?;
            let kernel = if scaled { sm100::fwd_scaled } else { sm100::fwd };
            (kernel(&fwd, &tile), "sm_100a")
        }
        "sm100_mla" => {
            let mut tile = Sm100MlaTile {
                by_tma: true,
                box_keys: 64,
                lazy_rescale_log2: 8,
                vector_store: true,
                split_keys: 0,
                listed: false,
                two_caches: false,
                row_bytes: 0,
                stored: fwd.dtype_qk,
            };
            for (field, value) in of_tile {
                tile.set(field, value)?;
            }
            (sm100_mla::fwd(&fwd, &tile), "sm_100a")
        }
        _ => {
            let mut tile = sm90_bwd::default_tile(&spec);
            for (field, value) in of_tile {
                tile.set_field(field, value)?;
            }
            tile.check(&spec)?;
            let source = match kernel {
                "main" => sm90_bwd::main(&spec, &tile),
                "preprocess" => sm90_bwd::preprocess(&spec, &tile),
                "postprocess" => sm90_bwd::postprocess(&spec, &tile),
                "head_sums" => sm90_bwd::head_sums(&spec, &tile),
                "repair" => sm90_bwd::repair(&spec, &tile),
                "dbias" => sm90_bwd::dbias(&spec, &tile.of_dbias()),
                other => return Err(format!("kernel {other}").into()),
            };
            (source, "sm_90a")
        }
    };
    Ok((source, format!("arch={arch}\n")))
}

fn write(folder: &Path, source: &KernelSource, meta: &str) -> Result<(), Box<dyn Error>> {
    for header in source.headers() {
        let path = folder.join(header.name.as_ref());
        std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
        std::fs::write(path, header.text.as_ref())?;
    }
    std::fs::write(folder.join("entry.cu"), &source.entry)?;
    std::fs::write(folder.join("meta.txt"), meta)?;
    Ok(())
}

/// Sets a field of the spec; false where the spec has none of this name.
fn set_spec(spec: &mut BwdSpec, field: &str, value: &str) -> Result<bool, Box<dyn Error>> {
    let (fwd, on) = (&mut spec.fwd, value == "1");
    match field {
        "dtype" => {
            let dtype: DType = value.parse()?;
            (fwd.dtype_qk, fwd.dtype_v, fwd.dtype_o, spec.dtype_grad) = (dtype, dtype, dtype, dtype);
        }
        "dtype_v" => fwd.dtype_v = value.parse()?,
        "dtype_o" => fwd.dtype_o = value.parse()?,
        "dtype_grad" => spec.dtype_grad = value.parse()?,
        "dbias" => (spec.write_dbias, spec.dtype_dbias) = (true, value.parse()?),
        "dim" => (fwd.head_dim_qk, fwd.head_dim_v) = (value.parse()?, value.parse()?),
        "dim_v" => fwd.head_dim_v = value.parse()?,
        "mask" => {
            fwd.mask = match value {
                "Full" => MaskKind::Full,
                "Upper" => MaskKind::Upper,
                "Band" => MaskKind::Band,
                _ => return Err(format!("mask {value}").into()),
            };
        }
        "paged" => fwd.kv_layout = KvKind::Paged,
        "group" if on => (fwd.q_layout, fwd.kv_layout) = (QLayout::Packed, KvKind::Packed),
        "group" => (fwd.q_layout, fwd.kv_layout) = (QLayout::Batch, KvKind::Strided),
        "v_columns" => fwd.v_layout = if on { VLayout::ColMajor } else { VLayout::RowMajor },
        "dropout" => fwd.dropout = on,
        "sink_columns" => fwd.sink_columns = on,
        "softcap" => fwd.softcap = on,
        "sink" => (fwd.sink, spec.write_dsink) = (on, on),
        "deterministic" => spec.deterministic = on,
        "negative_scale" => fwd.negative_scale = on,
        "write_lse" => fwd.write_lse = on,
        "bias" if value == "alibi" => fwd.bias = BiasKind::Alibi,
        "bias" => (fwd.bias, fwd.dtype_bias) = (BiasKind::Elementwise, value.parse()?),
        _ => return Ok(false),
    }
    Ok(true)
}
