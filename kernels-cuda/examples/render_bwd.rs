//! Renders the Hopper backward's kernels as `render` does, a folder each. Reads lines `NAME
//! kernel=main|preprocess|postprocess|head_sums|repair|dbias field=value ...`; fields that are not named have
//! their defaults.
//!
//! `echo 'd128 kernel=main dim=128 mask=Upper' | cargo run --example render_bwd -- out`

use std::error::Error;
use std::io::Read as _;
use std::path::PathBuf;

use fmha_core::fields::Fields as _;
use fmha_core::spec::{BiasKind, BwdSpec, KvKind};
use fmha_core::{DType, MaskKind, QLayout};
use fmha_kernels_cuda::sm90_bwd;

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(std::env::args().nth(1).ok_or("usage: render_bwd FOLDER < kernels.txt")?);
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let name = words.next().ok_or("a line has no name")?;
        let fields: Vec<(&str, &str)> = words.filter_map(|word| word.split_once('=')).collect();
        let mut spec = BwdSpec::plain(DType::Bf16, 128, MaskKind::Full);
        let mut tile_fields = Vec::new();
        let mut kernel = "main";
        for &(field, value) in &fields {
            match field {
                "kernel" => kernel = value,
                "dtype" => {
                    let dtype: DType = value.parse()?;
                    (spec.fwd.dtype_qk, spec.fwd.dtype_v, spec.fwd.dtype_o) = (dtype, dtype, dtype);
                    spec.dtype_grad = dtype;
                }
                "dbias" => (spec.write_dbias, spec.dtype_dbias) = (true, value.parse()?),
                "dtype_grad" => spec.dtype_grad = value.parse()?,
                "dim" => (spec.fwd.head_dim_qk, spec.fwd.head_dim_v) = (value.parse()?, value.parse()?),
                "dim_v" => spec.fwd.head_dim_v = value.parse()?,
                "mask" => {
                    spec.fwd.mask = match value {
                        "Full" => MaskKind::Full,
                        "Upper" => MaskKind::Upper,
                        "Band" => MaskKind::Band,
                        _ => return Err(format!("mask {value}").into()),
                    };
                }
                "group" if value == "1" => {
                    (spec.fwd.q_layout, spec.fwd.kv_layout) = (QLayout::Packed, KvKind::Packed);
                }
                "deterministic" => spec.deterministic = value == "1",
                "softcap" => spec.fwd.softcap = value == "1",
                "dropout" => spec.fwd.dropout = value == "1",
                "sink" => (spec.fwd.sink, spec.write_dsink) = (value == "1", value == "1"),
                "bias" => {
                    spec.fwd.bias = match value {
                        "alibi" => BiasKind::Alibi,
                        dtype => {
                            spec.fwd.dtype_bias = dtype.parse()?;
                            BiasKind::Elementwise
                        }
                    };
                }
                _ => tile_fields.push((field, value)),
            }
        }
        let mut tile = sm90_bwd::default_tile(&spec);
        for (field, value) in tile_fields {
            tile.set_field(field, value)?;
        }
        tile.check(&spec).map_err(|why| format!("{name}: {why}"))?;
        let source = match kernel {
            "main" => sm90_bwd::main(&spec, &tile),
            "preprocess" => sm90_bwd::preprocess(&spec, &tile),
            "postprocess" => sm90_bwd::postprocess(&spec, &tile),
            "head_sums" => sm90_bwd::head_sums(&spec, &tile),
            "repair" => sm90_bwd::repair(&spec, &tile),
            "dbias" => sm90_bwd::dbias(&spec, &tile.of_dbias()),
            other => return Err(format!("{name}: kernel {other}").into()),
        };
        let folder = out.join(name);
        for header in source.headers() {
            let path = folder.join(header.name.as_ref());
            std::fs::create_dir_all(path.parent().unwrap_or(&folder))?;
            std::fs::write(path, header.text.as_ref())?;
        }
        std::fs::write(folder.join("entry.cu"), &source.entry)?;
        let meta = format!("{tile:?}\nthreads={}\nsmem={}\n", tile.num_threads(), tile.smem_bytes(&spec));
        std::fs::write(folder.join("meta.txt"), meta)?;
    }
    Ok(())
}
