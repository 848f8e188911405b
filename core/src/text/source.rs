//! Device text: the headers that every vendor's kernels share, those rendered from Rust, and the
//! entry file of one kernel.
//!
//! A kernel is compiled from one entry file of a few lines and a set of headers, given to the
//! compiler by name. Nothing here reads a file at run time.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, OnceLock};

use include_dir::{Dir, include_dir};

use crate::abi::{self, AbiLiteral, AbiStruct};
use crate::code_source::{CODE_H, CodeSource, expr_h};
use crate::combine::Merge;
use crate::dtype::DType;
use crate::layout::QLayout;
use crate::layout::VLayout;
use crate::mask::MaskKind;
use crate::problem::Code;
use crate::spec::{BiasKind, BwdSpec, CodeKind, CombineSpec, FwdSpec, KvKind};

/// One header: the name that `#include <...>` uses, and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Path by which the header is included, such as `fmha/mask.h`.
    pub name: Cow<'static, str>,
    /// The header's text.
    pub text: Cow<'static, str>,
}

impl Header {
    /// A header embedded in the program.
    #[must_use]
    pub const fn embedded(name: &'static str, text: &'static str) -> Self {
        Self { name: Cow::Borrowed(name), text: Cow::Borrowed(text) }
    }

    /// The headers in a crate's folder `fmha` and its subfolders, by name. Cargo rebuilds for a new file only if a
    /// listed file of its folder changes too, such as the one that includes it.
    #[must_use]
    pub fn all_of(folder: &'static Dir<'static>) -> Vec<Self> {
        let below = folder.dirs().flat_map(Self::all_of);
        let own = folder.files().filter_map(|file| {
            let name = format!("fmha/{}", file.path().display()).replace('\\', "/");
            Some(Self { name: Cow::Owned(name), text: Cow::Borrowed(file.contents_utf8()?) })
        });
        own.chain(below).collect()
    }

    /// A header with definitions that Rust declares, in a namespace, after these includes.
    #[must_use]
    pub fn shared(name: &'static str, namespace: &str, includes: &[&str], definitions: &[String]) -> Self {
        let includes: String = includes.iter().map(|include| format!("#include <{include}>\n")).collect();
        let text = format!(
            "#pragma once\n{includes}\nnamespace {namespace} {{\n\n{}\n}}  // namespace {namespace}\n",
            definitions.join("\n")
        );
        Self::rendered(name, text)
    }

    /// A header rendered at run time.
    #[must_use]
    pub fn rendered(name: &'static str, text: String) -> Self {
        Self { name: Cow::Borrowed(name), text: Cow::Owned(text) }
    }
}

/// Source text from which one kernel is compiled.
///
/// The entry contains the kernel's name, its spec and its tile, which decide everything else. A device finds a
/// loaded kernel by its entry alone. The headers, some 200 KB to render and to hash, are rendered only to search
/// for a kernel in a bundle, on disk, or to compile it.
#[derive(Clone)]
pub struct KernelSource {
    /// The translation unit; defines one `extern "C"` kernel named [`ENTRY`].
    pub entry: String,
    /// The headers that the entry includes, directly or not, and no others: they are part of the kernel's key.
    headers: OnceLock<Vec<Header>>,
    /// Function that renders all headers, called when one is first needed.
    all: Arc<dyn Fn() -> Vec<Header> + Send + Sync>,
    /// Whether the kernel evaluates no score or mask as code.
    asks_none: bool,
}

impl KernelSource {
    /// A translation unit with the headers of `all` that it includes, directly or not, in their order. `all` is
    /// called when the headers are first needed. An include inside `#if` counts too, since the conditions are not
    /// evaluated here.
    ///
    /// Two sources of one entry must have the same headers.
    #[must_use]
    pub fn new(entry: String, all: impl Fn() -> Vec<Header> + Send + Sync + 'static) -> Self {
        Self { entry, headers: OnceLock::new(), all: Arc::new(all), asks_none: false }
    }

    /// A translation unit with exactly these headers, whether it includes them or not.
    #[must_use]
    pub fn with(entry: String, headers: Vec<Header>) -> Self {
        Self { entry, headers: headers.into(), all: Arc::new(Vec::new), asks_none: false }
    }

    /// Marks a kernel that evaluates no score or mask as code, although its headers mention them: its compiled form
    /// serves calls with any functions.
    #[must_use]
    pub fn without_code(self) -> Self {
        Self { asks_none: true, ..self }
    }

    /// The translation unit with a call's functions in place; unchanged if it does not include them.
    #[must_use]
    pub fn with_code(self, code: &CodeSource<'_>) -> Self {
        if self.asks_none || !self.headers().iter().any(|header| header.name == CODE_H) {
            return self;
        }
        let functions = code.header();
        let hash: String = hmac_sha256::Hash::hash(functions.text.as_bytes())
            .iter()
            .fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
        let mut headers = self.headers().to_vec();
        headers
            .iter_mut()
            .filter(|header| header.name == CODE_H)
            .for_each(|header| *header = functions.clone());
        Self::with(format!("// Functions {hash}\n{}", self.entry), headers)
    }

    /// The headers that the entry reaches.
    #[must_use]
    pub fn headers(&self) -> &[Header] {
        self.headers.get_or_init(|| reached(&self.entry, (self.all)()))
    }
}

impl Default for KernelSource {
    fn default() -> Self {
        Self::with(String::new(), Vec::new())
    }
}

impl PartialEq for KernelSource {
    fn eq(&self, other: &Self) -> bool {
        self.entry == other.entry && self.headers() == other.headers()
    }
}

impl Eq for KernelSource {}

impl fmt::Debug for KernelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (entry, headers) = (&self.entry, self.headers());
        f.debug_struct("KernelSource").field("entry", entry).field("headers", &headers).finish()
    }
}

/// The headers that `entry` includes, directly or not, in the order of `headers`.
fn reached(entry: &str, mut headers: Vec<Header>) -> Vec<Header> {
    let mut reached = vec![false; headers.len()];
    let mut unread = vec![entry];
    while let Some(text) = unread.pop() {
        for name in includes(text) {
            if let Some(at) = headers.iter().position(|header| header.name == name)
                && !std::mem::replace(&mut reached[at], true)
            {
                unread.push(&headers[at].text);
            }
        }
    }
    let mut reached = reached.into_iter();
    headers.retain(|_| reached.next().unwrap_or(false));
    headers
}

/// Names of the headers that a text includes.
pub fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let name = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.trim_start();
        let close = match name.as_bytes().first()? {
            b'<' => '>',
            b'"' => '"',
            _ => return None,
        };
        name[1..].split_once(close).map(|(name, _)| name)
    })
}

/// Symbol under which every kernel is compiled.
pub const ENTRY: &str = "fmha_kernel";

/// The headers that kernels of all vendors share.
#[must_use]
pub fn headers() -> Vec<Header> {
    static FOLDER: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/device/fmha");
    let mut headers = Header::all_of(&FOLDER);
    headers.push(expr_h());
    // The header of a call without functions; `KernelSource::with_code` replaces it.
    headers.push(CodeSource { code: &Code::default(), gradients: &[] }.header());
    headers.extend([params_h(), spec_h()]);
    headers
}

/// Header `fmha/params.h`, with the structs of run-time arguments.
fn params_h() -> Header {
    let structs = [
        abi::View::c_definition(),
        abi::HeadScalars::c_definition(),
        abi::MaskParams::c_definition(),
        abi::FwdParams::c_definition(),
        abi::BwdParams::c_definition(),
        abi::PartPointers::c_definition(),
        abi::CombineParams::c_definition(),
    ];
    Header::shared("fmha/params.h", "fmha", &["fmha/portable.h"], &structs)
}

/// Header `fmha/spec.h`, with the structs of compile-time facts.
fn spec_h() -> Header {
    let types = [
        DType::c_definition(),
        MaskKind::c_definition(),
        VLayout::c_definition(),
        QLayout::c_definition(),
        KvKind::c_definition(),
        BiasKind::c_definition(),
        CodeKind::c_definition(),
        Merge::c_definition(),
        FwdSpec::c_definition(),
        BwdSpec::c_definition(),
        CombineSpec::c_definition(),
    ];
    Header::shared("fmha/spec.h", "fmha", &["fmha/portable.h"], &types)
}

/// The parts of an entry file.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Header with the kernel's body, such as `fmha/sm90/fwd.cuh`.
    pub include: &'a str,
    /// Named compile-time constants: `("kSpec", &spec)`.
    pub constants: &'a [(&'a str, &'a dyn Literal)],
    /// Text between `extern "C" __global__ void` and the kernel's name: launch bounds.
    pub bounds: &'a str,
    /// The kernel's parameters.
    pub params: &'a str,
    /// The body: one call.
    pub call: &'a str,
}

/// A value of [`AbiLiteral`] as a trait object.
pub trait Literal: std::fmt::Debug {
    /// The declaration `constexpr TYPE NAME = VALUE;`.
    fn declare(&self, name: &str) -> String;
}

impl<T: AbiLiteral + std::fmt::Debug> Literal for T {
    fn declare(&self, name: &str) -> String {
        format!("constexpr {} {name} = {};", T::c_type(), self.c_literal())
    }
}

impl Entry<'_> {
    /// Text of the translation unit.
    #[must_use]
    pub fn render(&self) -> String {
        let constants: String =
            self.constants.iter().map(|(name, value)| value.declare(name) + "\n").collect();
        format!(
            "#include <{}>\nusing namespace fmha;\n{constants}\
             extern \"C\" __global__ void {} {ENTRY}({}) {{ {} }}\n",
            self.include, self.bounds, self.params, self.call
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_names_every_fact_of_its_spec() {
        let spec = FwdSpec::plain(DType::Bf16, 128, MaskKind::Upper);
        let entry = Entry {
            include: "fmha/x.cuh",
            constants: &[("kSpec", &spec)],
            bounds: "__launch_bounds__(128, 1)",
            params: "FwdParams p",
            call: "x::fwd<kSpec>(p);",
        };
        let text = entry.render();
        assert!(text.contains("constexpr FwdSpec kSpec = { .dtype_qk = DType::Bf16, "), "{text}");
        assert!(text.contains(".head_dim_qk = 128, "), "{text}");
        assert!(text.contains(".mask = MaskKind::Upper, "), "{text}");
        assert!(
            text.contains("extern \"C\" __global__ void __launch_bounds__(128, 1) fmha_kernel("),
            "{text}"
        );
    }

    #[test]
    fn a_source_has_the_headers_that_its_entry_reaches_and_no_other() {
        fn header(name: &'static str, text: &str) -> Header {
            Header::rendered(name, text.to_owned())
        }
        let all = || {
            vec![
                header("unused.h", "#include <leaf.h>\n"),
                header("leaf.h", "int leaf;\n#include <top.h>\n"),
                header(
                    "top.h",
                    "  # include \"behind_if.h\" // why\n// #include <unused.h>\n#include <leaf.h>",
                ),
                header("behind_if.h", "#if 0\n#include <system.h>\n#endif\n"),
            ]
        };
        let names = |source: KernelSource| -> Vec<String> {
            source.headers().iter().map(|header| header.name.clone().into_owned()).collect()
        };
        let entry = "#include <top.h>\n";
        assert_eq!(names(KernelSource::new(entry.to_owned(), all)), ["leaf.h", "top.h", "behind_if.h"]);
        assert!(names(KernelSource::new("includes nothing".to_owned(), all)).is_empty());
    }

    /// Every include of a shared header is itself a shared header, also in headers that a recipe adds. Exceptions:
    /// a vendor provides the lanes of `fmha/simt`, and GPU backends share the lists of tiles.
    #[test]
    fn every_include_of_a_shared_header_is_a_shared_header() {
        let mut headers = headers();
        headers.extend([
            crate::cache_update::header(),
            crate::choose_params::header(),
            crate::quantize_params::header(),
            crate::index_loss_params::header(),
            crate::lists::header(),
            crate::second::header(),
            crate::masks::header(),
            crate::scale_params::header(),
            crate::value_params::header(),
            crate::small_outputs::header(),
        ]);
        headers.extend(["fmha/simt/lanes.h", "fmha/tile_list.h"].map(|name| Header::embedded(name, "")));
        for header in &headers {
            for name in includes(&header.text) {
                assert!(headers.iter().any(|header| header.name == name), "{}: {name}", header.name);
            }
        }
    }
}
