//! One file with all of its mutants in it, each behind its number.
//!
//! At most one mutant is on in a process, so the branch of one holds the sound text of what lies inside it; only the
//! sound branch holds the guards of inner mutants. The text grows by depth times length, not by a power:
//! `a + b * c` is `(if on(1) {(a - b * c)} else {(a + (if on(2) {(b / c)} else {(b * c)}))})`. Operands with calls are
//! evaluated once, in front of the branches, since what is inlined always would be in each: `f(a) + b` is
//! `(match (f(a), b) { (l, r) => if on(1) {(l - r)} else {(l + r)} })`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::mutant::Mutant;

/// Text of a file with the guards of its mutants.
pub(crate) struct Rewritten {
    pub(crate) text: String,
    /// Range in `text` of each mutant's own branch.
    pub(crate) branches: Vec<(Range<usize>, u32)>,
    /// Range in `text` of each site, with its original branch, and the numbers of its mutants.
    pub(crate) sites: Vec<(Range<usize>, Vec<u32>)>,
}

/// Reasons why mutants have no guard, by the mutants' numbers.
pub(crate) type LeftOut = BTreeMap<u32, &'static str>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Form {
    /// Guard `if on(N) { return VALUE; }` in front of a function's first statement.
    Return,
    /// Guard ` if !on(N)` behind a match arm's pattern.
    Arm,
    /// Mutated guard of a match arm.
    Guard,
    /// Expression that is copied into each branch.
    Expr,
    /// Expression whose operands are evaluated before the branches.
    Once(Operands),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operands {
    /// Operands of a sum, a product or a shift.
    Values,
    /// Operands of a comparison, which are borrowed.
    Borrowed,
    /// Right operand of an assignment.
    Assigned,
    /// Operand of `-` or `!`.
    Alone,
    /// Operands of `&&` or `||`: the left one decides whether the right one is evaluated.
    Lazy,
}

/// Place in a file that is rewritten.
struct Site {
    range: Range<usize>,
    form: Form,
    /// Mutants of the site: number, replaced range, replacement.
    mutants: Vec<(u32, Range<usize>, String)>,
    /// Start of the second operand; the end of the site for forms without one.
    second: usize,
}

/// Rewrites `text` with `mutants`, all of one file, without those in `dropped`. The mutants in `copied` get a copy of
/// the expression in each branch.
pub(crate) fn rewrite(
    text: &str,
    mutants: &[(u32, &Mutant)],
    dropped: &LeftOut,
    copied: &BTreeSet<u32>,
) -> Result<(Rewritten, LeftOut), String> {
    let file = syn::parse_file(text).map_err(|error| error.to_string())?;
    let mut by_start: BTreeMap<(usize, usize), Vec<(u32, &Mutant)>> = BTreeMap::new();
    for &(number, mutant) in mutants.iter().filter(|(number, _)| !dropped.contains_key(number)) {
        let range = mutant.range(text);
        by_start.entry((range.start, range.end)).or_default().push((number, mutant));
    }
    let mut finder =
        Finder { text, copied, by_start, sites: Vec::new(), left_out: LeftOut::new(), constants: 0 };
    finder.visit_file(&file);
    let Finder { by_start, mut sites, mut left_out, .. } = finder;
    left_out.extend(by_start.values().flatten().map(|(number, _)| (*number, "no place found")));
    sites.sort_by_key(|site| {
        (site.range.start, site.form != Form::Return, Reverse(site.range.end), site.form)
    });
    let mut writer =
        Writer { text, out: Rewritten { text: String::new(), branches: Vec::new(), sites: Vec::new() } };
    writer.emit(0..text.len(), &sites);
    Ok((writer.out, left_out))
}

struct Finder<'a> {
    text: &'a str,
    copied: &'a BTreeSet<u32>,
    by_start: BTreeMap<(usize, usize), Vec<(u32, &'a Mutant)>>,
    sites: Vec<Site>,
    left_out: LeftOut,
    /// Number of constants that enclose the visited expression.
    constants: usize,
}

impl Finder<'_> {
    fn take(&mut self, key: Range<usize>, genre: &str, form: Form, range: Range<usize>) {
        self.take_operands(key, genre, form, range, usize::MAX);
    }

    fn take_operands(
        &mut self,
        key: Range<usize>,
        genre: &str,
        form: Form,
        range: Range<usize>,
        second: usize,
    ) {
        let Some(here) = self.by_start.get_mut(&(key.start, key.end)) else { return };
        let (found, others): (Vec<_>, Vec<_>) = here.drain(..).partition(|(_, mutant)| mutant.genre == genre);
        *here = others;
        if self.constants > 0 {
            self.left_out.extend(found.iter().map(|(number, _)| (*number, "evaluated by the compiler")));
        } else if !found.is_empty() {
            let mutants =
                found.iter().map(|(number, m)| (*number, key.clone(), m.replacement.clone())).collect();
            let is_copied = found.iter().any(|(number, _)| self.copied.contains(number));
            let form = if is_copied { Form::Expr } else { form };
            self.sites.push(Site { range, form, mutants, second });
        }
    }

    fn body(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let (Some(first), Some(last)) = (block.stmts.first(), block.stmts.last()) else { return };
        let body = first.span().byte_range().start..last.span().byte_range().end;
        // In a function that returns `impl Trait` every `return` must have the body's type, and a mutant's has another.
        if self.text[signature.output.span().byte_range()].contains("impl ")
            && let Some(found) = self.by_start.remove(&(body.start, body.end))
        {
            self.left_out.extend(found.iter().map(|(number, _)| (*number, "no guard compiles")));
        }
        self.take(body.clone(), "FnValue", Form::Return, body.start..body.start);
    }

    fn constant(&mut self, visit: impl FnOnce(&mut Self)) {
        self.constants += 1;
        visit(self);
        self.constants -= 1;
    }
}

fn operands(op: &syn::BinOp) -> Operands {
    use syn::BinOp::{
        Add, And, BitAnd, BitOr, BitXor, Div, Eq, Ge, Gt, Le, Lt, Mul, Ne, Or, Rem, Shl, Shr, Sub,
    };
    match op {
        And(_) | Or(_) => Operands::Lazy,
        Eq(_) | Ne(_) | Lt(_) | Le(_) | Gt(_) | Ge(_) => Operands::Borrowed,
        Add(_) | Sub(_) | Mul(_) | Div(_) | Rem(_) | Shl(_) | Shr(_) | BitAnd(_) | BitOr(_) | BitXor(_) => {
            Operands::Values
        }
        _ => Operands::Assigned,
    }
}

/// Whether an operand of this chain of `&&` is a `let`: Rust allows such a chain only in conditions.
fn has_let(expr: &syn::Expr) -> bool {
    match expr {
        syn::Expr::Let(_) => true,
        syn::Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        _ => false,
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.body(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.body(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.body(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_expr_binary(&mut self, expr: &'ast syn::ExprBinary) {
        let op = expr.op.span().byte_range();
        if matches!(expr.op, syn::BinOp::And(_)) && (has_let(&expr.left) || has_let(&expr.right)) {
            // Rust does not allow `||` beside `let`.
            if let Some(found) = self.by_start.remove(&(op.start, op.end)) {
                self.left_out.extend(found.iter().map(|(number, _)| (*number, "does not compile")));
            }
        }
        let has_call = self.text[expr.span().byte_range()].contains('(');
        let form = if has_call { Form::Once(operands(&expr.op)) } else { Form::Expr };
        let second = expr.right.span().byte_range().start;
        self.take_operands(op, "BinaryOperator", form, expr.span().byte_range(), second);
        visit::visit_expr_binary(self, expr);
    }

    fn visit_expr_unary(&mut self, expr: &'ast syn::ExprUnary) {
        let has_call = self.text[expr.span().byte_range()].contains('(');
        let form = if has_call { Form::Once(Operands::Alone) } else { Form::Expr };
        let (op, operand) = (expr.op.span().byte_range(), expr.expr.span().byte_range());
        self.take_operands(op, "UnaryOperator", form, expr.span().byte_range(), operand.start);
        visit::visit_expr_unary(self, expr);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        let end = arm.pat.span().byte_range().end;
        self.take(arm.span().byte_range(), "MatchArm", Form::Arm, end..end);
        if let Some((_, guard)) = &arm.guard {
            let range = guard.span().byte_range();
            self.take(range.clone(), "MatchArmGuard", Form::Guard, range);
        }
        visit::visit_arm(self, arm);
    }

    fn visit_expr_struct(&mut self, expr: &'ast syn::ExprStruct) {
        for pair in expr.fields.pairs() {
            let field = pair.value().span().byte_range();
            let end = pair.punct().map_or(field.end, |comma| comma.span().byte_range().end);
            self.take(field.start..end, "StructField", Form::Expr, expr.span().byte_range());
        }
        visit::visit_expr_struct(self, expr);
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.constant(|finder| visit::visit_item_const(finder, item));
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.constant(|finder| visit::visit_impl_item_const(finder, item));
    }

    fn visit_trait_item_const(&mut self, item: &'ast syn::TraitItemConst) {
        self.constant(|finder| visit::visit_trait_item_const(finder, item));
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.constant(|finder| visit::visit_item_static(finder, item));
    }

    fn visit_expr_const(&mut self, expr: &'ast syn::ExprConst) {
        self.constant(|finder| visit::visit_expr_const(finder, expr));
    }

    fn visit_generic_argument(&mut self, argument: &'ast syn::GenericArgument) {
        self.constant(|finder| visit::visit_generic_argument(finder, argument));
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.constant(|finder| visit::visit_variant(finder, variant));
    }

    fn visit_type_array(&mut self, array: &'ast syn::TypeArray) {
        self.constant(|finder| visit::visit_type_array(finder, array));
    }

    fn visit_expr_repeat(&mut self, repeat: &'ast syn::ExprRepeat) {
        self.visit_expr(&repeat.expr);
        self.constant(|finder| finder.visit_expr(&repeat.len));
    }
}

struct Writer<'a> {
    text: &'a str,
    out: Rewritten,
}

impl Writer<'_> {
    /// Writes `range` of the text, with `sites`, which lie in it, outer ones first.
    fn emit(&mut self, range: Range<usize>, mut sites: &[Site]) {
        let mut at = range.start;
        while let Some((site, rest)) = sites.split_first() {
            self.out.text.push_str(&self.text[at..site.range.start]);
            let inner =
                rest.iter().take_while(|inner| inner.range.end <= site.range.end && !site.range.is_empty());
            let inner = inner.count();
            self.site(site, &rest[..inner]);
            at = site.range.end;
            sites = &rest[inner..];
        }
        self.out.text.push_str(&self.text[at..range.end]);
    }

    fn site(&mut self, site: &Site, inner: &[Site]) {
        let start = self.out.text.len();
        match site.form {
            Form::Return => {
                for (number, _, value) in &site.mutants {
                    self.branch(*number, &format!("if ::fmha_mutant::on({number}) {{ return {value}; }} "));
                }
            }
            Form::Arm => {
                for (number, ..) in &site.mutants {
                    self.branch(*number, &format!(" if !::fmha_mutant::on({number})"));
                }
            }
            Form::Once(operands) => self.once(site, operands, inner),
            Form::Guard | Form::Expr => {
                self.out.text.push('(');
                for (number, replaced, put) in &site.mutants {
                    let before = &self.text[site.range.start..replaced.start];
                    let after = &self.text[replaced.end..site.range.end];
                    self.out.text.push_str(&format!("if ::fmha_mutant::on({number}) {{"));
                    self.branch(*number, &format!("({before}{put}{after})"));
                    self.out.text.push_str("} else ");
                }
                self.out.text.push_str("{(");
                self.emit(site.range.clone(), inner);
                self.out.text.push_str(")})");
            }
        }
        let numbers = site.mutants.iter().map(|(number, ..)| *number).collect();
        self.out.sites.push((start..self.out.text.len(), numbers));
    }

    /// Rewrites an expression whose operands are evaluated once.
    fn once(&mut self, site: &Site, operands: Operands, inner: &[Site]) {
        let Some((number, op, _)) = site.mutants.first().cloned() else { return };
        let (of_first, of_second) =
            inner.split_at(inner.partition_point(|inner| inner.range.start < site.second));
        let (first, second) = (site.range.start..op.start, site.second..site.range.end);
        let op = &self.text[op];
        match operands {
            Operands::Lazy => {
                self.out.text.push_str("({ let fmha_l: bool = ");
                self.emit(first, of_first);
                let sign = if op == "&&" { "!=" } else { "==" };
                self.out.text.push_str("; ");
                self.branch(number, &format!("if fmha_l {sign} ::fmha_mutant::on({number})"));
                self.out.text.push_str(" {");
                self.emit(second, of_second);
                self.out.text.push_str("} else { fmha_l } })");
                return;
            }
            Operands::Values | Operands::Borrowed => {
                let sign = if operands == Operands::Borrowed { "&" } else { "" };
                self.out.text.push_str(&format!("(match ({sign}("));
                self.emit(first.clone(), of_first);
                self.out.text.push_str(&format!("), {sign}("));
                self.emit(second, of_second);
                self.out.text.push_str(")) { (fmha_l, fmha_r) => ");
            }
            Operands::Assigned | Operands::Alone => {
                self.out.text.push_str("(match (");
                self.emit(second, of_second);
                self.out.text.push_str(") { fmha_r => ");
            }
        }
        let left = match operands {
            Operands::Assigned => &self.text[first.clone()],
            Operands::Alone => "",
            _ => "fmha_l ",
        };
        for (number, _, put) in &site.mutants {
            self.out.text.push_str(&format!("if ::fmha_mutant::on({number}) {{"));
            self.branch(*number, &format!("({left}{put} fmha_r)"));
            self.out.text.push_str("} else ");
        }
        self.out.text.push_str("{(");
        match operands {
            Operands::Assigned => self.emit(first, of_first),
            _ => self.out.text.push_str(left),
        }
        self.out.text.push_str(&format!("{op} fmha_r)}} }})"));
    }

    fn branch(&mut self, number: u32, text: &str) {
        let start = self.out.text.len();
        self.out.text.push_str(text);
        self.out.branches.push((start..self.out.text.len(), number));
    }
}
