//! `fmha devices`.

use std::io::Write;

use clap::Args;
use fmha::DType;
use serde_json::json;

use crate::Verdict;
use crate::failure::Failure;

/// Options of `fmha devices`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fmha devices           a line for each device, and why other kinds are absent
  fmha devices --json    the same for programs")]
pub(super) struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl DevicesArgs {
    pub(super) fn carry_out(&self, out: &mut dyn Write) -> Result<Verdict, Failure> {
        let devices = fmha::devices();
        if self.json {
            let list: Vec<_> = devices.iter().map(as_json).collect();
            writeln!(out, "{:#}", json!({ "devices": list }))?;
            return Ok(Verdict::Right);
        }
        for device in &devices {
            match &device.device {
                Ok(backend) => {
                    writeln!(out, "{:<8} present  {}", device.backend.to_string(), backend.name())?;
                    writeln!(out, "{:<8}          kernels: {}", "", backend.kernels().join(", "))?;
                    writeln!(out, "{:<8}          roofline: {}", "", backend.roofline(DType::Bf16))?;
                }
                Err(reason) => writeln!(out, "{:<8} absent   {reason}", device.backend.to_string())?,
            }
        }
        Ok(Verdict::Right)
    }
}

fn as_json(device: &fmha::Found) -> serde_json::Value {
    match &device.device {
        Ok(backend) => {
            let roofline = backend.roofline(DType::Bf16);
            json!({
                "backend": device.backend.to_string(),
                "present": true,
                "name": backend.name(),
                "kernels": backend.kernels(),
                "flops_per_second": roofline.flops_per_second,
                "bytes_per_second": roofline.bytes_per_second,
                "roofline_source": roofline.source,
            })
        }
        Err(reason) => json!({
            "backend": device.backend.to_string(),
            "present": false,
            "reason": reason.to_string(),
        }),
    }
}
