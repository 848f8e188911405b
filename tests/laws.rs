//! Rules of the repository that a machine can check.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace's folder").to_owned()
}

/// Files of the repository below `folder` whose name ends in one of `endings`, without build output.
fn files(folder: &str, endings: &[&str]) -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.path().is_dir() {
                if name != "target" && !name.starts_with('.') {
                    walk(&entry.path(), found);
                }
            } else {
                found.push(entry.path());
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join(folder), &mut found);
    found.sort();
    found
        .into_iter()
        .filter(|path| endings.iter().any(|ending| path.to_string_lossy().ends_with(ending)))
        .filter(|path| !path.ends_with("tests/laws.rs"))
        .filter_map(|path| {
            let name = path.strip_prefix(root()).ok()?.to_string_lossy().into_owned();
            Some((name, fs::read_to_string(path).ok()?))
        })
        .collect()
}

const SOURCE: &[&str] = &[".rs", ".h", ".cuh", ".cu", ".hip", ".py", ".toml", ".md"];
const DEVICE: &[&str] = &[".h", ".cuh", ".cu", ".hip"];

/// Part of a line before its comment.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or("").trim()
}

/// Lines of code for which `broken` is true, as `file:line: text`.
fn violations(files: &[(String, String)], broken: impl Fn(&str, &str) -> bool) -> Vec<String> {
    files
        .iter()
        .flat_map(|(name, text)| text.lines().enumerate().map(move |(i, line)| (name, i + 1, line)))
        .filter(|(name, _, line)| broken(name, line))
        .map(|(name, number, line)| format!("{name}:{number}: {}", line.trim()))
        .collect()
}

fn none(broken: &[String]) {
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

fn words(line: &str) -> impl Iterator<Item = String> {
    line.split(|c: char| !c.is_alphanumeric()).map(str::to_ascii_lowercase)
}

/// Threads may read the environment at any time, and a foreseeable name may already be taken by another user.
#[test]
fn no_library_sets_the_environment_or_makes_a_name_of_its_own_in_the_temporary_folder() {
    let tested =
        |name: &str| name.contains("/tests/") || name.starts_with("tests/") || name.ends_with("tests.rs");
    let all: Vec<_> = files("", &[".rs"]).into_iter().filter(|(name, _)| !tested(name)).collect();
    assert!(all.len() > 100, "{} files", all.len());
    let broken = |_: &str, line: &str| {
        let code = code(line);
        ["set_var(", "remove_var(", "temp_dir().join", "process::id()"].iter().any(|word| code.contains(word))
    };
    none(&violations(&all, broken));
}

#[test]
fn core_and_what_gpus_share_name_no_vendor_in_their_code() {
    let vendors = ["cuda", "nvidia", "nvrtc", "hip", "rocm", "amd", "hiprtc", "cubin"];
    let shared = [files("core/src", SOURCE), files("backend-gpu/src", SOURCE)].concat();
    assert!(shared.iter().any(|(name, _)| name.starts_with("backend-gpu")));
    none(&violations(&shared, |name, line| {
        // Only the table of environment variables names those of every backend.
        name != "core/src/env.rs" && words(code(line)).any(|word| vendors.contains(&word.as_str()))
    }));
}

#[test]
fn instructions_are_spelt_only_where_instructions_live() {
    let mut device = files("kernels-cuda", DEVICE);
    device.extend(files("kernels-hip", DEVICE));
    device.extend(files("core/device", DEVICE));
    none(&violations(&device, |name, line| {
        let home = name.contains("/ptx/") || name.contains("/isa/");
        !home && words(code(line)).any(|word| word == "asm")
    }));
}

#[test]
fn every_static_assert_says_what_it_means() {
    let mut device = files("kernels-cuda", DEVICE);
    device.extend(files("kernels-hip", DEVICE));
    device.extend(files("core/device", DEVICE));
    let mut broken = Vec::new();
    for (name, text) in &device {
        for statement in text.split("static_assert").skip(1) {
            let end = statement.find(';').unwrap_or(statement.len());
            if !statement[..end].contains('"') {
                broken.push(format!("{name}: static_assert{}", &statement[..end]));
            }
        }
    }
    none(&broken);
}

/// Targets of the `](...)` links in a line's prose, without web pages and anchors of the same page.
fn linked(line: &str) -> impl Iterator<Item = &str> {
    let prose = line.split('`').step_by(2);
    prose
        .flat_map(|text| text.split("](").skip(1))
        .filter_map(|rest| rest.split(')').next())
        .map(|target| target.split('#').next().unwrap_or(target))
        .filter(|target| {
            !target.is_empty() && !target.contains("://") && !target.contains(char::is_whitespace)
        })
}

#[test]
fn every_link_of_a_page_leads_somewhere() {
    let broken = violations(&files("", &[".md"]), |page, line| {
        let folder = root().join(page).parent().expect("a page is in a folder").to_owned();
        linked(line).any(|target| !folder.join(target).exists())
    });
    none(&broken);
    assert_eq!(
        linked("[a](b.md#c) `[d](e)` [f](https://g.h) [i](#j) [k](l/)").collect::<Vec<_>>(),
        ["b.md", "l/"]
    );
}

#[test]
fn nothing_asks_to_be_kept_in_sync_and_nothing_is_left_to_do() {
    none(&violations(&files("", SOURCE), |_, line| {
        let lower = line.to_ascii_lowercase();
        lower.contains("keep in sync")
            || words(line).any(|word| word == "todo" || word == "fixme" || word == "xxx")
    }));
}

const COMMENTED: &[&str] = &[".rs", ".h", ".cuh", ".py"];

/// Mark of a comment that stands on a line of its own, and the text behind it.
fn comment(line: &str) -> Option<(&'static str, &str)> {
    let line = line.trim_start();
    let mark = ["///", "//!", "//"].into_iter().find(|mark| line.starts_with(mark));
    let mark = mark.or_else(|| ["# "].into_iter().find(|mark| line.starts_with(mark)))?;
    Some((mark, line[mark.len()..].trim()))
}

/// First lines of comments for which `broken` is true, as `file:line: text`.
fn openings(files: &[(String, String)], broken: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for (name, text) in files {
        let mut before: Option<(&str, &str)> = None;
        for (i, line) in text.lines().enumerate() {
            let here = comment(line);
            let goes_on = match (before, here) {
                (Some((mark, text)), Some((of, _))) => mark == of && !text.is_empty(),
                _ => false,
            };
            if let Some((_, text)) = here.filter(|_| !goes_on)
                && broken(text)
            {
                found.push(format!("{name}:{}: {text}", i + 1));
            }
            before = here;
        }
    }
    found
}

/// Whether a comment begins without its subject, as if the one before it had named it.
fn names_no_subject(text: &str) -> bool {
    const WORDS: &[&str] = &[
        "Of ",
        "Else ",
        "That ",
        "Its ",
        "It ",
        "It, ",
        "Whose ",
        "Who ",
        "Whoever ",
        "Nobody ",
        "The same ",
        "What ",
        "As above",
        "As before",
        "Likewise",
        "So ",
        "They ",
        "SAFETY: as above",
        "SAFETY: likewise",
        "SAFETY: passed on",
    ];
    WORDS.iter().any(|word| text.starts_with(word))
}

#[test]
fn every_comment_begins_with_its_subject() {
    none(&openings(&files("", COMMENTED), names_no_subject));
}

#[test]
fn a_comment_s_first_line_alone_is_its_opening() {
    let text =
        "/// Its name.\n/// Of it.\n///\n/// Of each row.\nfn f() {} // Of f.\n# The same in Python.\n";
    let file = ("a.rs".to_owned(), text.to_owned());
    assert_eq!(
        openings(&[file], names_no_subject),
        ["a.rs:1: Its name.", "a.rs:4: Of each row.", "a.rs:6: The same in Python."]
    );
}

/// Addresses and pictures in columns may be wider.
#[test]
fn comments_are_120_columns_wide_at_most() {
    none(&violations(&files("", COMMENTED), |_, line| {
        let is_free = |mark: &str| line.contains("http") || line.trim_start()[mark.len()..].contains("  ");
        line.chars().count() > 120 && comment(line).is_some_and(|(mark, _)| !is_free(mark))
    }));
}

#[test]
fn nothing_speaks_of_the_machine_it_was_written_on() {
    none(&violations(&files("", SOURCE), |_, line| {
        ["/work/", "/root/", "/home/"].iter().any(|path| line.contains(path))
    }));
}

#[test]
fn every_environment_variable_is_in_the_table_and_the_readme() {
    // Emulators are separate crates with variables and READMEs of their own. `xtask`, the mutators and some tests of
    // multiprocessors and of CTAs' order use them.
    let emulators = |name: &str| {
        name.starts_with("tests/emulators")
            || name.starts_with("xtask")
            || [
                "tests/choose.rs",
                "tests/index_loss.rs",
                "tests/made_delta.rs",
                "tests/mutants.rs",
                "tests/quantize.rs",
                "cli/tests/balance.rs",
                "cli/tests/blackwell.rs",
            ]
            .contains(&name)
    };
    let sources = files("", &[".rs"]).into_iter().filter(|(name, _)| !emulators(name));
    let mentioned: BTreeSet<String> = sources
        .flat_map(|(_, text)| {
            let quoted = text.split('"').filter(|word| word.starts_with("FMHA_"));
            quoted.map(str::to_owned).collect::<Vec<_>>()
        })
        .filter(|word| word.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))
        .collect();
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let table: BTreeSet<&str> = fmha_core::env::ALL.iter().map(|var| var.name).collect();
    let missing: Vec<String> = mentioned
        .iter()
        .filter(|name| !table.contains(name.as_str()) || !readme.contains(name.as_str()))
        .cloned()
        .collect();
    none(&missing);
}

/// Names in an interface's column of the table in docs/names.md.
fn names_in_table(column: usize) -> BTreeSet<String> {
    let page = fs::read_to_string(root().join("docs/names.md")).expect("docs/names.md");
    let rows = page.lines().filter(|line| line.starts_with("| ") && line.contains('`'));
    rows.flat_map(|row| {
        let cell = row.split('|').nth(column + 1).unwrap_or_default();
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()
    })
    .collect()
}

/// Text of a file between the first `from` and the next `to`.
fn stretch(name: &str, from: &str, to: &str) -> String {
    let text = fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let (_, rest) = text.split_once(from).unwrap_or_else(|| panic!("{name}: no {from}"));
    rest.split_once(to).unwrap_or_else(|| panic!("{name}: no {to} behind {from}")).0.to_owned()
}

/// Names before the colon of each field of a Rust struct, or of each parameter of a Python function.
fn declared(text: &str, before: &str) -> BTreeSet<String> {
    let fields = text.lines().filter_map(|line| line.trim().strip_prefix(before)?.split_once(':'));
    let is_name = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit())
    };
    fields.map(|(name, _)| name.to_owned()).filter(|name| is_name(name)).collect()
}

/// Options of the command as typed: `long = "x"`, or the field's own name.
fn typed_options(name: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut found = BTreeSet::new();
    let mut lines = text.lines().map(str::trim);
    while let Some(line) = lines.next() {
        let typed = |words: &&str| words.contains("long") && !words.contains("hide = true");
        let Some(words) = line.strip_prefix("#[arg(").filter(typed) else { continue };
        let field = lines.next().unwrap_or_default().trim_start_matches("pub(super) ");
        let own = field.split(':').next().unwrap_or_default().replace('_', "-");
        let given = words.split_once("long = \"").and_then(|(_, rest)| rest.split('"').next());
        found.insert(format!("--{}", given.unwrap_or(&own)));
    }
    found
}

/// Each fact of a call has one name: docs/names.md has every name of every interface, and no other.
#[test]
fn the_table_of_names_is_that_of_the_doors() {
    let [rust, c, python, command, candle] = [0, 1, 2, 3, 4].map(names_in_table);
    let mut broken = Vec::new();
    let mut lacks = |what: &str, names: &BTreeSet<String>, all: &BTreeSet<String>| {
        broken.extend(names.difference(all).map(|name| format!("{what}: {name}")));
    };

    let source =
        |folder: &str| files(folder, &[".rs", ".py"]).into_iter().map(|(_, text)| text).collect::<String>();
    let core: BTreeSet<String> = (source("core/src") + &source("dist/src"))
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .map(str::to_owned)
        .collect();
    lacks("not in Rust", &rust, &core);

    let structs = |names: &[&str]| -> BTreeSet<String> {
        let fields = |name: &&str| {
            let file = if *name == "FmhaRanks" { "ranks" } else { "structs" };
            let file = format!("bindings/c/src/{file}.rs");
            declared(&stretch(&file, &format!("pub struct {name} {{"), "\n}"), "pub ")
        };
        let own = names.iter().flat_map(fields);
        own.filter(|name| name != "struct_bytes" && name != "reserved").collect()
    };
    let of_calls = structs(&[
        "FmhaProblem",
        "FmhaArgs",
        "FmhaGradients",
        "FmhaCache",
        "FmhaOptions",
        "FmhaCode",
        "FmhaLists",
        "FmhaMasks",
        "FmhaBlockScales",
        "FmhaPart",
        "FmhaCaptured",
        "FmhaCapturedArgs",
        "FmhaCombineProblem",
        "FmhaCombineArgs",
        "FmhaPartial",
        "FmhaSecond",
        "FmhaSecondArgs",
        "FmhaChooseProblem",
        "FmhaChooseArgs",
        "FmhaIndexLoss",
        "FmhaQuantizeProblem",
        "FmhaQuantizeArgs",
        "FmhaRanks",
    ]);
    lacks("not in the table, C", &of_calls, &c);
    let mut in_c = &of_calls | &structs(&["FmhaStrides"]);
    // The device is the first argument of the function that plans.
    in_c.insert("device".to_owned());
    lacks("not in C", &c, &in_c);

    let arguments = "bindings/python/fmha/_arguments.py";
    let mut keywords = declared(&stretch(arguments, "def bind(", ") ->"), "");
    let cache = stretch(arguments, "CACHE_TENSORS = (", ")");
    keywords.extend(cache.split('"').skip(1).step_by(2).map(str::to_owned));
    keywords.extend(declared(
        &stretch("bindings/python/fmha/_mask_data.py", "class BlockLists", ") -> None:"),
        "",
    ));
    for function in [
        "def attention(\n    q: Tensor,",
        "def attention_out(",
        "def attention_with_kvcache(\n    q: Tensor,",
    ] {
        keywords.extend(declared(&stretch("bindings/python/fmha/__init__.py", function, ") ->"), ""));
    }
    for function in ["def combine(", "def add_parts("] {
        let signature = stretch("bindings/python/fmha/__init__.py", function, ") ->");
        keywords.extend(declared(&signature.replace(", ", "\n"), ""));
    }
    keywords.extend(declared(&stretch("bindings/python/fmha/dist.py", "def attention(", ") ->"), ""));
    lacks("not in the table, Python", &keywords, &python);
    keywords.insert("q".to_owned());
    lacks("not in Python", &python, &keywords);

    let mut options = &typed_options("cli/src/options.rs") | &typed_options("cli/src/cache.rs");
    for file in ["ranks", "lists_file"] {
        options.extend(typed_options(&format!("cli/src/{file}.rs")));
    }
    lacks("not in the table, the command", &options, &command);
    let of_plans = typed_options("cli/src/explain.rs");
    lacks("not an option of the command", &command, &(&options | &of_plans));

    let door = "bindings/candle/src/lib.rs";
    let fields = declared(&stretch(door, "pub struct Options {", "\n}"), "pub ");
    lacks("not in the table, candle", &fields, &candle);
    let text = source("bindings/candle/src");
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned).collect();
    lacks("not in candle's door", &candle, &words);
    none(&broken);
}

#[test]
fn the_arrows_between_crates_are_as_drawn() {
    let may_depend = |krate: &str| -> &[&str] {
        match krate {
            // Emulators know instructions and not attention, so they use no crate of the library; nor does the core.
            "fmha-core" | "fmha-emu-cdna" | "fmha-emu-ptx" => &[],
            "fmha-cpu" | "fmha-gpu" | "fmha-conformance" => &["fmha-core"],
            "fmha-kernels-cuda" | "fmha-kernels-hip" => &["fmha-core", "fmha-gpu"],
            "fmha-cuda" => &["fmha-core", "fmha-gpu", "fmha-kernels-cuda"],
            "fmha-rocm" => &["fmha-core", "fmha-gpu", "fmha-kernels-hip"],
            "fmha" => &["fmha-core", "fmha-cpu", "fmha-cuda", "fmha-rocm"],
            "fmha-cli" => &["fmha", "fmha-core", "fmha-conformance", "fmha-dist"],
            "fmha-dist" => &["fmha"],
            "fmha-c" => &["fmha", "fmha-dist"],
            // fmha-py uses the C structs, since it would otherwise repeat their checks.
            "fmha-py" => &["fmha", "fmha-core", "fmha-c"],
            "fmha-emu-hip" | "fmha-emu-hiprtc" => &["fmha-emu-cdna"],
            "fmha-emu-libcuda" => &["fmha-emu-ptx"],
            // fmha-emu-silicon also compares the interpreter's results for whole attention calls with a device's.
            "fmha-emu-silicon" => &["fmha-core", "fmha-cuda", "fmha-conformance", "fmha-emu-ptx"],
            _ => &["fmha", "fmha-core"],
        }
    };
    let mut broken = Vec::new();
    for (name, text) in files("", &["Cargo.toml"]) {
        // Emulators have workspaces of their own, since a crate that links one would build it with every command.
        if !name.starts_with("tests/emulators/") && text.contains("fmha-emu-") {
            broken.push(format!("{name}: an emulator is linked, and not opened when it is asked for"));
        }
        let Some(krate) = text.lines().find_map(|line| line.strip_prefix("name = ")) else { continue };
        let krate = krate.trim_matches('"');
        let section = |heading: &str| {
            text.split(heading).nth(1).map(|rest| rest.split("\n[").next().unwrap_or("")).unwrap_or_default()
        };
        for line in section("\n[dependencies]").lines() {
            let dependency = line.split(['.', ' ', '=']).next().unwrap_or("");
            let ours = dependency == "fmha" || dependency.starts_with("fmha-");
            if ours && !may_depend(krate).contains(&dependency) {
                broken.push(format!("{name}: {krate} -> {dependency}"));
            }
        }
    }
    none(&broken);
}

#[test]
fn every_instruction_names_its_section_of_the_manual() {
    let mut broken = Vec::new();
    let families =
        files("kernels-cuda/fmha/ptx", DEVICE).into_iter().chain(files("kernels-hip/fmha/isa", DEVICE));
    for (name, text) in families {
        for (i, line) in text.lines().enumerate() {
            let function = code(line).starts_with("FMHA_DEVICE") && line.contains('(');
            if !function {
                continue;
            }
            let above = text.lines().take(i).collect::<Vec<_>>();
            let documented = above
                .iter()
                .rev()
                .take_while(|line| {
                    line.trim_start().starts_with("//") || line.trim_start().starts_with("template")
                })
                .any(|line| line.contains("ISA") || line.contains("http"));
            if !documented {
                broken.push(format!("{name}:{}: {}", i + 1, line.trim()));
            }
        }
    }
    none(&broken);
}
