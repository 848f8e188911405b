//! `silicon record FOLDER [--driver LIBRARY | --emulated]`: runs every program and call, writes `recording.txt`, and in
//! `differences.txt` what the emulator makes otherwise. `silicon compare RECORDING`: emulates all, compares.

use std::fmt::Write as _;
use std::process::ExitCode;

use fmha_emu_silicon::program::Program;
use fmha_emu_silicon::record::{ProgramRecord, Recording};
use fmha_emu_silicon::run::{Driver, Emulated, Runner};
use fmha_emu_silicon::{compare, forward, programs};

const USAGE: &str = "\
usage: silicon record FOLDER [--driver LIBRARY | --emulated]
       silicon compare RECORDING
       silicon differences FOLDER
       silicon list [FOLDER]

`record` runs every program and every attention call on the first device of the driver (default libcuda.so.1), or all
emulated, and writes FOLDER/recording.txt. FOLDER/differences.txt has what the emulator makes otherwise of a program.
`differences` emulates anew the programs that have a file NUMBER.words there and tells what still differs.
`compare` runs them emulated and holds the results to a recording. `list` prints the names; with a folder, the PTX of
each program goes there.";

fn write(path: &str, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{path}: {error}"))
}

/// Most differences of one program that are printed.
const MOST_TOLD: usize = 40;

/// Results in which the emulator differs from a device.
fn tell(program: &Program, emulated: Result<Vec<u32>, String>, device: &[u32], told: &mut String) {
    let emulated = match emulated {
        Ok(emulated) => emulated,
        Err(error) => {
            let _ = writeln!(told, "NOT EMULATED {}: {error}", program.name);
            return;
        }
    };
    let input = program.input();
    let words = emulated.iter().zip(device).enumerate();
    let differ: Vec<String> = words
        .filter_map(|(at, (&emulated, &device))| compare::word(program, &input, at, emulated, device).err())
        .collect();
    for text in differ.iter().take(MOST_TOLD) {
        let _ = writeln!(told, "{text}");
    }
    if !differ.is_empty() {
        let _ = writeln!(told, "{}: {} of {} words differ", program.name, differ.len(), device.len());
    }
}

fn differences(folder: &str) -> Result<(), String> {
    let (mut told, mut count) = (String::new(), 0);
    for (program, number) in programs::all().into_iter().zip(1..) {
        let Ok(bytes) = std::fs::read(format!("{folder}/{number:03}.words")) else { continue };
        let words: Vec<u32> =
            bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        count += 1;
        tell(&program, Emulated.run(&program), &words, &mut told);
    }
    print!("{told}");
    println!("{count} programs compared in full");
    if told.is_empty() { Ok(()) } else { Err("some differ".into()) }
}

fn record(folder: &str, driver: Option<&str>) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{folder}: {error}"))?;
    let (runner, device): (Box<dyn Runner>, String) = match driver {
        Some(path) => {
            let driver = Driver::open(path)?;
            let device = format!("{}, driver {}", driver.device, driver.version);
            (Box::new(driver), device)
        }
        None => (Box::new(Emulated), "emulated".into()),
    };
    let mut recording = Recording { device, ..Recording::default() };
    let (mut told, mut refused) = (String::new(), 0);
    for (program, number) in programs::all().into_iter().zip(1..) {
        let output = match runner.run(&program) {
            Ok(output) => output,
            Err(error) => {
                refused += 1;
                let _ = writeln!(told, "NOT RUN {}: {error}", program.name);
                continue;
            }
        };
        recording.programs.insert(program.name.clone(), ProgramRecord::new(&program, &output));
        if driver.is_none() {
            continue;
        }
        let emulated = Emulated.run(&program);
        if emulated.as_ref().ok() != Some(&output) {
            let bytes: Vec<u8> = output.iter().flat_map(|word| word.to_le_bytes()).collect();
            let path = format!("{folder}/{number:03}.words");
            std::fs::write(&path, bytes).map_err(|error| format!("{path}: {error}"))?;
        }
        tell(&program, emulated, &output, &mut told);
    }
    write(&format!("{folder}/differences.txt"), &told)?;
    println!("{} programs recorded, {refused} not run", recording.programs.len());
    write(&format!("{folder}/recording.txt"), &recording.to_text())?;
    let backend = forward::open(driver.is_none())?;
    for (call, number) in forward::calls().into_iter().zip(1..) {
        // A machine that is taken away leaves what was done by then.
        if number % 32 == 0 {
            println!("{number} calls");
            write(&format!("{folder}/recording.txt"), &recording.to_text())?;
        }
        match forward::record(&backend, &call) {
            Ok(record) => {
                recording.calls.insert(call.name.clone(), record);
            }
            Err(error) => {
                refused += 1;
                let _ = writeln!(told, "NOT RUN call {}: {error}", call.name);
            }
        }
    }
    write(&format!("{folder}/differences.txt"), &told)?;
    write(&format!("{folder}/recording.txt"), &recording.to_text())?;
    println!("{} calls recorded; {refused} programs and calls not run", recording.calls.len());
    if refused > 0 {
        Err(format!("{refused} were not run: {folder}/differences.txt says why"))
    } else {
        Ok(())
    }
}

fn compare(path: &str) -> Result<(), String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let recording = Recording::from_text(&text)?;
    let mut wrong = 0;
    for (what, outcome) in [
        ("programs", compare::programs(&recording)),
        ("calls", forward::compare_all(&recording, &forward::open(true)?, |_| true)),
    ] {
        println!("{what}: {outcome}");
        wrong += outcome.failures.len();
    }
    if wrong > 0 { Err(format!("{wrong} differ from {}", recording.device)) } else { Ok(()) }
}

fn list(folder: Option<&str>) -> Result<(), String> {
    for (program, number) in programs::all().iter().zip(1..) {
        println!("program {}", program.name);
        if let Some(folder) = folder {
            write(&format!("{folder}/{number:03}.ptx"), &program.ptx())?;
        }
    }
    for call in forward::calls() {
        println!("call {}", call.name);
    }
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["record", folder] => record(folder, Some("libcuda.so.1")),
        ["record", folder, "--driver", path] => record(folder, Some(path)),
        ["record", folder, "--emulated"] => record(folder, None),
        ["compare", path] => compare(path),
        ["differences", folder] => differences(folder),
        ["list"] => list(None),
        ["list", folder] => list(Some(folder)),
        _ => Err(USAGE.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}
