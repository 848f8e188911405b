//! Runs a kernel of a code object in the emulator, or says what is in it. See `cdna-emu help`.

use std::process::ExitCode;

use fmha_emu_cdna::{Checks, Class, CodeObject, Counters, Device, Launch, Options, Recording};

const HELP: &str = "\
cdna-emu info FILE.co                       kernels, arguments, registers, LDS
cdna-emu disasm FILE.co                     instructions as the emulator decodes them
cdna-emu run FILE.co --kernel NAME [OPTIONS]
    --grid X[,Y[,Z]]        workgroups (1)
    --block X[,Y[,Z]]       work-items of a workgroup (64)
    --lds BYTES             dynamic LDS (0)
    --arg TYPE:VALUE        next argument: i32:5, u32:5, i64:5, u64:5, f32:1.5, or a buffer:
                            zeros:BYTES, new:BYTES (unwritten), file:PATH; out:PATH=BYTES is written to PATH after the run
    --fast                  no checks
    --profile               count LDS bank conflicts and cache lines
cdna-emu bench FILE.launch... [--fast] [--profile] [--repeat N]
                            runs recorded launches on one thread and prints wave instructions a second of processor time;
                            the driver double writes each launch to the folder FMHA_EMULATE_RECORD
cdna-emu mutate [TITLE=]FILE.launch... [--out FILE.md] [--reasons FILE] [--sources FOLDER]...
                            leaves out each s_waitcnt and s_barrier in turn and prints what reports it; --out rewrites
                            the table in a Markdown file; --reasons says why some mutants are no faults
                            (mnemonic | part of the source line | reason); --sources adds each source line's text
";

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["info", path] => info(path),
        ["disasm", path] => disasm(path),
        ["run", path, ..] => run(path, &words[2..]),
        ["bench", ..] => bench(&words[1..]),
        ["mutate", ..] => fmha_emu_cdna::mutation::run(&words[1..]).map_err(Failure::from),
        _ => {
            print!("{HELP}");
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cdna-emu: {error}");
            ExitCode::FAILURE
        }
    }
}

fn info(path: &str) -> Result<(), Failure> {
    let object = CodeObject::parse(&std::fs::read(path)?)?;
    println!("{}", object.arch);
    for k in &object.kernels {
        println!(
            "{}: entry 0x{:x}, {} VGPR ({} of them accumulators, {} spilled), {} SGPR ({} spilled), {} bytes LDS, {} bytes scratch, up to {} work-items",
            k.name,
            k.entry,
            k.vgpr_count,
            k.agpr_count,
            k.vgpr_spill_count,
            k.sgpr_count,
            k.sgpr_spill_count,
            k.lds_bytes,
            k.scratch_bytes,
            k.max_workgroup_size
        );
        for arg in &k.args {
            println!("    {:4} {:4} bytes {}", arg.offset, arg.size, arg.kind);
        }
    }
    Ok(())
}

fn disasm(path: &str) -> Result<(), Failure> {
    let object = CodeObject::parse(&std::fs::read(path)?)?;
    for inst in object.disassemble() {
        let place = inst.source.map(|s| format!("  ; {s}")).unwrap_or_default();
        println!("{:8x}  {} {}{place}", inst.pc, inst.mnemonic, inst.operands.join(", "));
    }
    Ok(())
}

fn triple(text: &str) -> Result<[u32; 3], Failure> {
    let mut out = [1; 3];
    for (slot, word) in out.iter_mut().zip(text.split(',')) {
        *slot = word.parse().map_err(|_| format!("{text} is not X,Y,Z"))?;
    }
    Ok(out)
}

fn run(path: &str, options: &[&str]) -> Result<(), Failure> {
    let code = std::fs::read(path)?;
    let arch = CodeObject::parse(&code)?.arch;
    let mut device = Device::new(arch, Options::default());
    let (mut kernel, mut grid, mut block, mut lds) = (String::new(), [1; 3], [64, 1, 1], 0);
    let (mut args, mut outputs): (Vec<u8>, Vec<(String, u64, usize)>) = (Vec::new(), Vec::new());
    let mut words = options.iter();
    while let Some(option) = words.next() {
        let mut value = || words.next().copied().ok_or_else(|| format!("{option} needs a value"));
        match *option {
            "--kernel" => value()?.clone_into(&mut kernel),
            "--grid" => grid = triple(value()?)?,
            "--block" => block = triple(value()?)?,
            "--lds" => lds = value()?.parse()?,
            "--fast" => device.options.checks = Checks::NONE,
            "--profile" => device.options.profile = true,
            "--arg" => push(&device, value()?, &mut args, &mut outputs)?,
            other => return Err(format!("unknown option {other}; see cdna-emu help").into()),
        }
    }
    let module = device.load(&code)?;
    let began = std::time::Instant::now();
    let launch = Launch { grid, block, dynamic_lds: lds, args: &args };
    let counters = device.launch(&module, &kernel, &launch)?;
    let seconds = began.elapsed().as_secs_f64();
    println!("{} wave instructions in {seconds:.3} s of the host's time", counters.total());
    for class in Class::ALL {
        println!("    {class:?}: {}", counters.of(class));
    }
    println!("    passes of matrix instructions: {}", counters.mfma_passes);
    if device.options.profile {
        print_profile(&counters);
    }
    for (path, address, bytes) in outputs {
        std::fs::write(path, device.memory.read_vec(address, bytes)?)?;
    }
    Ok(())
}

fn print_profile(counters: &Counters) {
    println!(
        "    LDS cycles {} + {} by bank conflicts",
        counters.lds_cycles_min, counters.lds_conflict_cycles
    );
    println!("    cache lines {} of at least {}", counters.vmem_lines, counters.vmem_lines_min);
}

/// Seconds of processor time of this thread.
fn seconds() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

fn bench(words: &[&str]) -> Result<(), Failure> {
    let (mut files, mut repeat) = (Vec::new(), 1);
    let mut options = Options { sequential: true, ..Options::default() };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match *word {
            "--fast" => options.checks = Checks::NONE,
            "--profile" => options.profile = true,
            "--repeat" => repeat = words.next().ok_or("--repeat needs a value")?.parse()?,
            file => files.push(file),
        }
    }
    let (mut all, mut spent) = (0, 0.0);
    for file in files {
        let recording = Recording::from_bytes(&std::fs::read(file)?)?;
        let ready = recording.prepare(&recording.code, options)?;
        for _ in 0..repeat {
            let start = seconds();
            let counters = ready.run()?;
            let n = counters.total();
            let took = seconds() - start;
            println!("{n:>10} wave instructions, {:6.2} M/s: {file}", n as f64 / took * 1e-6);
            if options.profile {
                print_profile(&counters);
            }
            (all, spent) = (all + n, spent + took);
        }
    }
    println!("{all:>10} wave instructions, {:6.2} M/s of processor time", all as f64 / spent * 1e-6);
    Ok(())
}

/// Adds an argument, aligned to its size.
fn push(
    device: &Device,
    text: &str,
    args: &mut Vec<u8>,
    outputs: &mut Vec<(String, u64, usize)>,
) -> Result<(), Failure> {
    let (kind, value) = text.split_once(':').ok_or_else(|| format!("--arg {text} is not TYPE:VALUE"))?;
    let bytes = match kind {
        "i32" => value.parse::<i32>()?.to_le_bytes().to_vec(),
        "u32" => value.parse::<u32>()?.to_le_bytes().to_vec(),
        "i64" => value.parse::<i64>()?.to_le_bytes().to_vec(),
        "u64" => value.parse::<u64>()?.to_le_bytes().to_vec(),
        "f32" => value.parse::<f32>()?.to_le_bytes().to_vec(),
        "zeros" => device.memory.alloc_from(&vec![0; value.parse()?]).to_le_bytes().to_vec(),
        "new" => device.memory.alloc(value.parse()?).to_le_bytes().to_vec(),
        "file" => device.memory.alloc_from(&std::fs::read(value)?).to_le_bytes().to_vec(),
        "out" => {
            let (path, size) =
                value.split_once('=').ok_or_else(|| format!("--arg {text} is not out:PATH=BYTES"))?;
            let size = size.parse()?;
            let address = device.memory.alloc(size);
            outputs.push((path.to_owned(), address, size));
            address.to_le_bytes().to_vec()
        }
        other => return Err(format!("--arg {other}: unknown type").into()),
    };
    args.resize(args.len().next_multiple_of(bytes.len()), 0);
    args.extend(bytes);
    Ok(())
}
