//! Renders kernels for inspection or for a bench outside Rust: one folder a kernel, with its entry, its
//! headers and `meta.txt`. Reads lines `NAME field=value ...` from standard input, where fields are those of
//! `FwdSpec` and `Sm90Tile`; what is not named has its default. With `kernel=sm100` fields are those of
//! `Sm100Tile` (over MXFP8 with `scales=mxfp8`), with `kernel=sm90_mla`
//! those of `Sm90MlaTile`, with `kernel=sm100_mla` those of `Sm100MlaTile`, with `kernel=sm80` those of `Sm80Tile`, and
//! the folder is for the check of registers alone.
//!
//! `echo 'd128 dtype=bf16 dim=128 mask=Upper block_n=128' | cargo run --example render -- out`

use std::error::Error;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use fmha_core::fields::Fields as _;
use fmha_core::source::KernelSource;
use fmha_core::spec::{BiasKind, FwdSpec, KvKind};
use fmha_core::{DType, MaskKind, QLayout};
use fmha_kernels_cuda::sm80::{self, Room};
use fmha_kernels_cuda::sm90::{self, Sm90Tile};
use fmha_kernels_cuda::sm90_mla::{self, Sm90MlaTile};
use fmha_kernels_cuda::sm100;
use fmha_kernels_cuda::sm100_mla::{self, Sm100MlaTile};

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(std::env::args().nth(1).ok_or("usage: render FOLDER < kernels.txt")?);
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let name = words.next().ok_or("a line has no name")?;
        let fields: Vec<(&str, &str)> = words.filter_map(|word| word.split_once('=')).collect();
        let mut spec = FwdSpec::plain(DType::Bf16, 128, MaskKind::Full);
        let mut of_spec = Vec::new();
        for &(field, value) in &fields {
            of_spec.push(set_spec(&mut spec, field, value)?);
        }
        if fields.contains(&("kernel", "sm100")) {
            let scaled = fields.contains(&("scales", "mxfp8"));
            let mut tile = sm100::default_tile(&spec);
            if scaled {
                tile = tile.with_scales(&spec, 32);
            }
            for (&(field, value), of_spec) in fields.iter().zip(of_spec) {
                if !of_spec && field != "kernel" && field != "scales" {
                    tile.set(field, value)?;
                }
            }
            tile.check(&spec, 2).map_err(|why| format!("{name}: {why}"))?;
            let kernel = if scaled { sm100::fwd_scaled } else { sm100::fwd };
            write(&out.join(name), &kernel(&spec, &tile), "arch=sm_100a\n")?;
            continue;
        }
        if fields.contains(&("kernel", "sm90_mla")) {
            let mut tile = Sm90MlaTile {
                two_caches: false,
                row_bytes: 0,
                by_tma: true,
                cluster: 1,
                lazy_rescale_log2: 8,
                vector_store: true,
                v_in_k: (spec.head_dim_qk, spec.head_dim_v) == (576, 512),
                stored: spec.dtype_qk,
                listed: false,
                split_keys: 0,
                fold_parts: 1,
                shares: 0,
            };
            for (&(field, value), of_spec) in fields.iter().zip(of_spec) {
                match field {
                    "kernel" => {}
                    "stored" => tile.stored = value.parse()?,
                    "v_in_k" => tile.v_in_k = value == "1",
                    _ if of_spec => {}
                    _ => tile.set(field, value)?,
                }
            }
            write(&out.join(name), &sm90_mla::fwd(&spec, &tile), "arch=sm_90a\n")?;
            continue;
        }
        if fields.contains(&("kernel", "sm100_mla")) {
            let mut tile = Sm100MlaTile {
                by_tma: true,
                box_keys: 64,
                lazy_rescale_log2: 8,
                vector_store: true,
                split_keys: 0,
                listed: false,
                stored: spec.dtype_qk,
            };
            for (&(field, value), of_spec) in fields.iter().zip(of_spec) {
                if !of_spec && field != "kernel" {
                    tile.set(field, value)?;
                }
            }
            write(&out.join(name), &sm100_mla::fwd(&spec, &tile), "arch=sm_100a\n")?;
            continue;
        }
        if fields.contains(&("kernel", "sm80")) {
            let mut tile = sm80::default_tile(&spec, Room { smem_bytes: 232_448, num_sms: 132 });
            for (&(field, value), of_spec) in fields.iter().zip(of_spec) {
                match field {
                    "kernel" => {}
                    "stored" => (tile.stored, tile.converts_fp8) = (value.parse()?, true),
                    _ if of_spec => {}
                    _ => tile.set(field, value)?,
                }
            }
            tile.check().map_err(|why| format!("{name}: {why}"))?;
            write(&out.join(name), &sm80::fwd(&spec, &tile), "arch=sm_90a\n")?;
            continue;
        }
        let mut tile = sm90::default_tile(&spec);
        for (&(field, value), of_spec) in fields.iter().zip(of_spec) {
            if field != "stored" && !set_tile(&mut tile, field, value)? && !of_spec {
                return Err(format!("{name}: no field {field} in FwdSpec or Sm90Tile").into());
            }
        }
        if spec.kv_layout == KvKind::Paged && tile.copy_bytes == 0 {
            (tile.page_keys, tile.block_m) = (16, tile.block_m.min(128));
        }
        if let Some((_, stored)) = fields.iter().find(|(field, _)| *field == "stored") {
            tile = tile.over_narrow_cache(stored.parse()?);
            tile.take_raw_stages(&spec)?;
        }
        tile.check(&spec, 2).map_err(|why| format!("{name}: {why}"))?;
        let meta = format!(
            "threads={}\nsmem={}\nblock_m={}\nq_rows={}\nblock_n={}\nbox_qk={}\nbox_v={}\npack_gqa={}\norder={:?}\ncluster={}\ncluster_heads={}\n\
             dependent_launch={}\nbias_stages={}\nbox_bias={}\n",
            tile.num_threads(),
            tile.smem_bytes(&spec),
            tile.block_m,
            tile.q_rows(),
            tile.block_n,
            Sm90Tile::box_dim(spec.head_dim_qk, spec.dtype_qk),
            Sm90Tile::box_dim(spec.head_dim_v, spec.dtype_v),
            i32::from(tile.pack_gqa),
            tile.order,
            tile.cluster,
            i32::from(tile.cluster_heads),
            i32::from(tile.dependent_launch),
            tile.bias_stages,
            tile.bias_box()[0],
        );
        write(&out.join(name), &sm90::fwd(&spec, &tile), &meta)?;
    }
    Ok(())
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

fn set_spec(spec: &mut FwdSpec, field: &str, value: &str) -> Result<bool, Box<dyn Error>> {
    match field {
        "dtype" => {
            let dtype: DType = value.parse()?;
            (spec.dtype_qk, spec.dtype_v, spec.dtype_o) = (dtype, dtype, dtype);
        }
        "dtype_v" => spec.dtype_v = value.parse()?,
        "dtype_o" => spec.dtype_o = value.parse()?,
        "dim" => (spec.head_dim_qk, spec.head_dim_v) = (value.parse()?, value.parse()?),
        "dim_v" => spec.head_dim_v = value.parse()?,
        "mask" => {
            spec.mask = match value {
                "Full" => MaskKind::Full,
                "Upper" => MaskKind::Upper,
                "Band" => MaskKind::Band,
                _ => return Err(format!("mask {value}").into()),
            };
        }
        "paged" => spec.kv_layout = KvKind::Paged,
        "group" => {
            (spec.q_layout, spec.kv_layout) = match value {
                "1" => (QLayout::Packed, KvKind::Packed),
                _ => (QLayout::Batch, KvKind::Strided),
            };
        }
        "dropout" => spec.dropout = value == "1",
        "v_columns" => {
            spec.v_layout =
                if value == "1" { fmha_core::VLayout::ColMajor } else { fmha_core::VLayout::RowMajor };
        }
        "sink_columns" => spec.sink_columns = value == "1",
        "softcap" => spec.softcap = value == "1",
        "sink" => spec.sink = value == "1",
        "negative_scale" => spec.negative_scale = value == "1",
        "write_lse" => spec.write_lse = value == "1",
        "bias" => {
            spec.bias = BiasKind::Elementwise;
            match value {
                "alibi" => spec.bias = BiasKind::Alibi,
                dtype => spec.dtype_bias = dtype.parse()?,
            }
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Short names of fields are those of older plans.
fn set_tile(tile: &mut Sm90Tile, field: &str, value: &str) -> Result<bool, Box<dyn Error>> {
    let field = match field {
        "lazy" => "lazy_rescale_log2",
        "anchor" => "wait_anchor",
        "pack" => "pack_gqa",
        "vector" => "vector_store",
        other => other,
    };
    if !Sm90Tile::fields().iter().any(|known| known.name == field) {
        return Ok(false);
    }
    tile.set(field, value)?;
    Ok(true)
}
