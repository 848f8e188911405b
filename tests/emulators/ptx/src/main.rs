//! `ptx-emu run kernel.ptx --kernel NAME --grid X[,Y[,Z]] --block X[,Y[,Z]] --arg …`: runs a kernel of a PTX file.

mod observed;

use std::process::ExitCode;

use fmha_emu_ptx::{Asynchrony, Device, Kernel, LaunchConfig, Options, Recording, RowShift, mutation};

const USAGE: &str = "\
usage: ptx-emu run FILE.ptx [--kernel NAME] --grid X[,Y[,Z]] --block X[,Y[,Z]] [--cluster X[,Y[,Z]]]
                   [--shared BYTES] [--mode eager|hb|late:SEED] [--seeds N] [--row-shift to-next|from-next]
                   [--lines] [--arg ARG]...
       ptx-emu bench FILE.launch... [--mode eager|hb|late:SEED] [--repeat N] [--ptx FILE.ptx]
       ptx-emu list FILE.ptx
       ptx-emu record FOLDER [--sms N] -- COMMAND...
       ptx-emu cover FILE -- COMMAND...
       ptx-emu mutate [TITLE=]FILE.launch... [--schedules N] [--out FILE.md] [--reasons FILE] [--sources FOLDER]...
                      [--wrappers PREFIX]

An ARG is one parameter of the kernel, in order:
  u32:N  s32:N  u64:N  f32:X       a number
  buf:BYTES                        a zeroed buffer; its address
  uninit:BYTES                     a buffer that nothing has written
  f32s:N[:SEED]                    a buffer of N random floats in [-1, 1)
  in:FILE                          a buffer with a file's bytes
  out:BYTES:FILE                   a zeroed buffer, written to FILE when the kernel has ended
  hex:BYTES                        bytes of the parameter itself, as hexadecimal digits

`bench` runs recorded launches (the driver double writes them to the folder FMHA_EMULATE_RECORD) on one thread and
prints warp instructions a second of processor time; --ptx puts another module in the recorded one's place.

`record` runs a command that uses the driver double and keeps each of its launches in a file of FOLDER; the device has
N multiprocessors. `cover` writes the source lines that its launches have code for, and whether each was executed.

`mutate` takes recorded launches, leaves out or miscounts each instruction that synchronises, one at a time, runs each
such kernel, tracking happens-before, and prints what reports it. The sound kernel is run under N late schedules first.
Launches of one TITLE must have one text: a mutant is run on each that executes its instruction, until one reports.
--out rewrites the table in a Markdown file; --reasons says why some mutants are no faults (`opcode | part of the line |
part of its caller | ... | reason`); --sources adds each source line's text; --wrappers names the files whose callers
are the lines to show.

--seeds N runs N late schedules, seeds 1 to N. --lines prints the warp instructions of each source line. --row-shift
says which way `tcgen05.shift` moves contents, from row i + 1 (as without the flag) or to it: the instruction is documented
in words that allow either, and neither is verified on hardware.";

struct Arguments {
    kernel: Option<String>,
    config: LaunchConfig,
    options: Options,
    seeds: u64,
    lines: bool,
    args: Vec<String>,
}

fn triple(text: &str) -> Result<[u32; 3], String> {
    let mut out = [1; 3];
    for (slot, part) in out.iter_mut().zip(text.split(',')) {
        *slot = part.parse().map_err(|_| format!("`{text}` is not X[,Y[,Z]]"))?;
    }
    Ok(out)
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is no number of that type"))
}

fn mode(text: &str, options: &mut Options) -> Result<(), String> {
    match text.split_once(':') {
        Some(("late", seed)) => options.asynchrony = Asynchrony::Late { seed: number(seed)? },
        _ if text == "hb" => options.happens_before = true,
        _ if text == "eager" => {}
        _ => return Err(format!("`{text}` is no mode")),
    }
    Ok(())
}

fn row_shift(text: &str) -> Result<RowShift, String> {
    match text {
        "to-next" => Ok(RowShift::ToNext),
        "from-next" => Ok(RowShift::FromNext),
        _ => Err(format!("--row-shift `{text}` is neither to-next nor from-next")),
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let config = LaunchConfig {
        grid: [1; 3],
        block: [32, 1, 1],
        cluster: [1; 3],
        dynamic_shared: 0,
        dependent: false,
    };
    let mut out = Arguments {
        kernel: None,
        config,
        options: Options::default(),
        seeds: 0,
        lines: false,
        args: Vec::new(),
    };
    while let Some(flag) = words.next() {
        if flag == "--lines" {
            out.lines = true;
            continue;
        }
        let value = words.next().ok_or_else(|| format!("`{flag}` needs a value"))?;
        match flag.as_str() {
            "--kernel" => out.kernel = Some(value),
            "--grid" => out.config.grid = triple(&value)?,
            "--block" => out.config.block = triple(&value)?,
            "--cluster" => out.config.cluster = triple(&value)?,
            "--shared" => out.config.dynamic_shared = number(&value)?,
            "--seeds" => out.seeds = number(&value)?,
            "--arg" => out.args.push(value),
            "--mode" => mode(&value, &mut out.options)?,
            "--row-shift" => out.options.row_shift = row_shift(&value)?,
            _ => return Err(format!("unknown option `{flag}`")),
        }
    }
    Ok(out)
}

/// Random floats in [-1, 1), the same for the same seed.
fn floats(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..count).flat_map(|_| next().to_le_bytes()).collect()
}

type Outputs = Vec<(u64, usize, String)>;

fn argument(device: &Device, text: &str, outputs: &mut Outputs) -> Result<Vec<u8>, String> {
    let (kind, rest) = text.split_once(':').ok_or_else(|| format!("`{text}` is no argument"))?;
    let buffer = |bytes: &[u8]| -> Result<u64, String> {
        let address = device.alloc(bytes.len() as u64);
        device.upload(address, bytes).map_err(|f| f.to_string())?;
        Ok(address)
    };
    let address = match kind {
        "u32" => return Ok(number::<u32>(rest)?.to_le_bytes().to_vec()),
        "s32" => return Ok(number::<i32>(rest)?.to_le_bytes().to_vec()),
        "u64" => return Ok(number::<u64>(rest)?.to_le_bytes().to_vec()),
        "f32" => return Ok(number::<f32>(rest)?.to_le_bytes().to_vec()),
        "hex" => {
            let digits = (0..rest.len() / 2).map(|i| u8::from_str_radix(&rest[2 * i..2 * i + 2], 16));
            return digits.collect::<Result<_, _>>().map_err(|e| format!("`{rest}`: {e}"));
        }
        "buf" => buffer(&vec![0; number(rest)?])?,
        "uninit" => device.alloc(number(rest)?),
        "f32s" => {
            let (count, seed) = rest.split_once(':').unwrap_or((rest, "1"));
            buffer(&floats(number(count)?, number(seed)?))?
        }
        "in" => buffer(&std::fs::read(rest).map_err(|e| format!("{rest}: {e}"))?)?,
        "out" => {
            let (bytes, path) =
                rest.split_once(':').ok_or_else(|| format!("`{text}` is not out:BYTES:FILE"))?;
            let bytes = number(bytes)?;
            let address = buffer(&vec![0; bytes])?;
            outputs.push((address, bytes, path.to_string()));
            address
        }
        _ => return Err(format!("unknown kind of argument `{kind}`")),
    };
    Ok(address.to_le_bytes().to_vec())
}

fn run_once(text: &str, a: &Arguments, options: &Options) -> Result<(), String> {
    let device = Device::new();
    let module = device.load(text).map_err(|f| f.to_string())?;
    let names = module.kernel_names();
    let name = match (&a.kernel, names.as_slice()) {
        (Some(name), _) => name.as_str(),
        (None, [only]) => only,
        (None, _) => return Err(format!("--kernel must name one of {names:?}")),
    };
    let kernel: &Kernel = module.kernel(name).ok_or_else(|| format!("no kernel `{name}` among {names:?}"))?;
    let params = kernel.params();
    if params.len() != a.args.len() {
        return Err(format!("`{name}` has {} parameters, {} --arg given", params.len(), a.args.len()));
    }
    let (mut buffer, mut outputs) = (Vec::new(), Outputs::new());
    for (i, (&(offset, bytes), text)) in params.iter().zip(&a.args).enumerate() {
        let value = argument(&device, text, &mut outputs)?;
        if value.len() != bytes as usize {
            return Err(format!("--arg {text}: {} bytes, parameter {i} has {bytes}", value.len()));
        }
        buffer.resize(offset as usize, 0);
        buffer.extend(value);
    }
    let report = device.launch(kernel, &a.config, &buffer, options).map_err(|f| f.to_string())?;
    println!("{:#?}", report.counters);
    if a.lines {
        for (line, hits) in &report.source_lines {
            println!("source line {line}: {hits}");
        }
    }
    for (address, bytes, path) in outputs {
        let mut data = vec![0; bytes];
        device.download(address, &mut data).map_err(|f| f.to_string())?;
        std::fs::write(&path, data).map_err(|e| format!("{path}: {e}"))?;
    }
    Ok(())
}

/// Seconds of processor time of this thread.
fn seconds() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

fn bench(words: &[String]) -> Result<(), String> {
    let (mut files, mut options, mut repeat, mut ptx) = (Vec::new(), Options::default(), 1, None);
    options.parallel = false;
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("`{word}` needs a value"));
        match word.as_str() {
            "--mode" => mode(value()?, &mut options)?,
            "--repeat" => repeat = number(value()?)?,
            "--ptx" => {
                let path = value()?;
                ptx = Some(std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?);
            }
            _ => files.push(word),
        }
    }
    let (mut all, mut spent) = (0, 0.0);
    for file in files {
        let bytes = std::fs::read(file).map_err(|e| format!("{file}: {e}"))?;
        let mut recording = Recording::from_bytes(&bytes).map_err(|f| format!("{file}: {f}"))?;
        if let Some(text) = &ptx {
            recording.ptx.clone_from(text);
        }
        let ready = recording.prepare().map_err(|f| format!("{file}: {f}"))?;
        for _ in 0..repeat {
            let start = seconds();
            let report = ready.run(&options).map_err(|f| format!("{file}: {f}"))?;
            let took = seconds() - start;
            let n = report.counters.warp_instructions;
            println!("{n:>10} warp instructions, {:6.2} M/s: {file}", n as f64 / took * 1e-6);
            (all, spent) = (all + n, spent + took);
        }
    }
    println!("{all:>10} warp instructions, {:6.2} M/s of processor time", all as f64 / spent * 1e-6);
    Ok(())
}

fn main() -> ExitCode {
    let all: Vec<String> = std::env::args().skip(1).collect();
    if let Some(("bench", rest)) = all.split_first().map(|(command, rest)| (command.as_str(), rest)) {
        return finish(bench(rest));
    }
    let mut words = all.into_iter().peekable();
    if words.next_if(|word| word == "mutate").is_some() {
        return finish(mutation::run(words));
    }
    if words.next_if(|word| word == "record").is_some() {
        return finish(observed::record(words));
    }
    if words.next_if(|word| word == "cover").is_some() {
        return finish(observed::cover(words));
    }
    let (command, file) = (words.next(), words.next());
    let (Some(command), Some(file)) = (command, file) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let result = std::fs::read_to_string(&file).map_err(|e| format!("{file}: {e}")).and_then(|text| {
        match command.as_str() {
            "list" => {
                let module = Device::new().load(&text).map_err(|f| f.to_string())?;
                println!("{} (PTX {})", module.target(), module.version());
                for name in module.kernel_names() {
                    println!("{name} {:?}", module.kernel(name).map(Kernel::params).unwrap_or_default());
                }
                Ok(())
            }
            "run" => {
                let arguments = parse(words)?;
                let mut options = arguments.options.clone();
                for seed in 1..=arguments.seeds {
                    options.asynchrony = Asynchrony::Late { seed };
                    run_once(&text, &arguments, &options).map_err(|e| format!("seed {seed}: {e}"))?;
                }
                if arguments.seeds == 0 {
                    run_once(&text, &arguments, &options)?;
                }
                Ok(())
            }
            _ => Err(USAGE.to_string()),
        }
    });
    finish(result)
}

fn finish(result: Result<(), String>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}
