//! Turns a parsed kernel into the compact form that runs: names become rows, labels become indices.

mod arith;
mod compact;
mod function;
mod matrix;
mod memory;
mod operand;
mod sync;

use std::collections::HashMap;

use crate::ast::{Func, Operand, RawInst, Space, Stmt, Ty, Var};
use crate::fault::{Fault, FaultKind};
use crate::op::{Code, File, Inst, Program, Reg, Special};

/// Bytes that the system keeps at the start of shared memory; touching them is a fault.
pub(crate) const RESERVED_SHARED: u32 = 1024;

/// Place of a module-level variable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Symbol {
    pub(crate) address: u64,
    pub(crate) space: Space,
}

/// Decodes `func`. `globals` are the module's global and constant variables; `shared` its shared ones.
pub(crate) fn decode(
    func: &Func,
    globals: &HashMap<String, Symbol>,
    shared: &[Var],
) -> Result<Program, Fault> {
    let mut d = Decoder::new(func, globals);
    d.layout_shared(func, shared);
    d.collect_labels(func)?;
    for stmt in &func.body {
        d.statement(stmt)?;
    }
    // Falling off the end is `ret`.
    d.push(Inst::new(Code::Exit), 0, 0);
    let mut program = d.finish(func);
    compact::compact(&mut program);
    Ok(program)
}

/// File, type, first row, and the count of a ranged declaration (`%r<9>`).
type Declared = (File, Ty, u32, Option<u32>);

struct Decoder<'a> {
    program: Program,
    globals: &'a HashMap<String, Symbol>,
    symbols: HashMap<String, Symbol>,
    /// Registers by name, innermost scope last.
    scopes: Vec<(usize, HashMap<String, Declared>)>,
    /// `(scope, name)` to instruction index.
    labels: HashMap<(usize, String), u32>,
    next_scope: usize,
    parents: Vec<usize>,
    rows: [u32; 3],
    word_consts: HashMap<u32, Reg>,
    double_consts: HashMap<u64, Reg>,
    specials: HashMap<Special, Reg>,
    tables: HashMap<String, u32>,
}

impl<'a> Decoder<'a> {
    fn new(func: &Func, globals: &'a HashMap<String, Symbol>) -> Self {
        let mut symbols = HashMap::new();
        for p in &func.params {
            symbols.insert(p.name.clone(), Symbol { address: u64::from(p.offset), space: Space::Param });
        }
        Self {
            program: Program { name: func.name.clone(), ..Program::default() },
            globals,
            symbols,
            scopes: vec![(0, HashMap::new())],
            labels: HashMap::new(),
            next_scope: 1,
            parents: vec![0],
            rows: [0; 3],
            word_consts: HashMap::new(),
            double_consts: HashMap::new(),
            specials: HashMap::new(),
            tables: HashMap::new(),
        }
    }

    /// Static shared variables first, dynamic ones after them, each at its alignment.
    fn layout_shared(&mut self, func: &Func, module: &[Var]) {
        let local = func.body.iter().filter_map(|s| match s {
            Stmt::Var(v) if v.space == Space::Shared => Some(v),
            _ => None,
        });
        let used = |name: &str| {
            func.body
                .iter()
                .any(|s| matches!(s, Stmt::Inst(i) if i.operands.iter().any(|o| mentions(o, name))))
        };
        let vars: Vec<&Var> = module.iter().filter(|v| used(&v.name)).chain(local).collect();
        let mut end = RESERVED_SHARED;
        for v in vars.iter().filter(|v| !v.dynamic) {
            end = end.next_multiple_of(v.align.max(1));
            self.symbols.insert(v.name.clone(), Symbol { address: u64::from(end), space: Space::Shared });
            end += v.bytes as u32;
        }
        self.program.static_shared = end - RESERVED_SHARED;
        let align = vars.iter().filter(|v| v.dynamic).map(|v| v.align).max().unwrap_or(16).max(16);
        let base = end.next_multiple_of(align);
        self.program.dynamic_base = base;
        for v in vars.iter().filter(|v| v.dynamic) {
            self.symbols.insert(v.name.clone(), Symbol { address: u64::from(base), space: Space::Shared });
        }
    }

    fn collect_labels(&mut self, func: &Func) -> Result<(), Fault> {
        let (mut stack, mut at) = (vec![0], 0u32);
        for stmt in &func.body {
            match stmt {
                Stmt::Open => {
                    self.parents.push(stack[stack.len() - 1]);
                    stack.push(self.parents.len() - 1);
                }
                Stmt::Close => {
                    stack.pop();
                }
                Stmt::Label(name) => {
                    if self.labels.insert((stack[stack.len() - 1], name.clone()), at).is_some() {
                        return Err(Fault::syntax(0, format!("label `{name}` defined twice in one scope")));
                    }
                }
                Stmt::Inst(_) => at += 1,
                Stmt::Regs { .. } | Stmt::Var(_) | Stmt::Targets { .. } => {}
            }
        }
        Ok(())
    }

    fn statement(&mut self, stmt: &Stmt) -> Result<(), Fault> {
        match stmt {
            Stmt::Open => {
                self.scopes.push((self.next_scope, HashMap::new()));
                self.next_scope += 1;
            }
            Stmt::Close => {
                self.scopes.pop();
            }
            Stmt::Regs { ty, name, count } => self.declare(*ty, name, *count),
            Stmt::Var(v) => self.local(v)?,
            Stmt::Label(_) => {}
            Stmt::Targets { name, labels } => {
                let targets = labels.iter().map(|l| self.label(l)).collect::<Result<Vec<_>, _>>()?;
                self.tables.insert(name.clone(), self.program.tables.len() as u32);
                self.program.tables.push(targets);
            }
            Stmt::Inst(raw) => {
                let inst = self.instruction(raw).map_err(|f| f.at(raw.line, raw.source_line))?;
                self.push(inst, raw.line, raw.source_line);
            }
        }
        Ok(())
    }

    fn push(&mut self, inst: Inst, line: u32, source_line: u32) {
        self.program.code.push(inst);
        self.program.lines.push((line, source_line));
    }

    fn finish(mut self, func: &Func) -> Program {
        let [words, doubles, preds] = self.rows;
        (self.program.words, self.program.doubles, self.program.preds) = (words, doubles, preds);
        self.program.const_words = self.word_consts.iter().map(|(&v, &r)| (r, v)).collect();
        self.program.const_doubles = self.double_consts.iter().map(|(&v, &r)| (r, v)).collect();
        self.program.specials = self.specials.iter().map(|(&s, &r)| (r, s)).collect();
        self.program.params.clone_from(&func.params);
        self.program.param_bytes = func.params.iter().map(|p| p.offset + p.bytes).max().unwrap_or(0);
        self.program.max_threads = func.max_threads;
        self.program.required_block = func.required_block;
        self.program.cluster = func.cluster;
        self.program.max_registers = func.max_registers;
        self.program
    }

    fn declare(&mut self, ty: Ty, name: &str, count: Option<u32>) {
        let file = match ty.bytes() {
            0 => File::Pred,
            8 | 16 => File::Double,
            _ => File::Word,
        };
        // A 128-bit register is two rows.
        let each = if ty == Ty::B128 { 2 } else { 1 };
        let start = self.rows[file as usize];
        self.rows[file as usize] += count.unwrap_or(1) * each;
        let last = self.scopes.len() - 1;
        self.scopes[last].1.insert(name.to_string(), (file, ty, start, count));
    }

    fn local(&mut self, v: &Var) -> Result<(), Fault> {
        match v.space {
            Space::Local => {
                let at = self.program.local_bytes.next_multiple_of(v.align.max(1));
                self.symbols.insert(v.name.clone(), Symbol { address: u64::from(at), space: Space::Local });
                self.program.local_bytes = at + v.bytes as u32;
                Ok(())
            }
            Space::Shared => Ok(()),
            other => {
                Err(Fault::unsupported(format!("variable `{}` in space {other:?} inside a kernel", v.name)))
            }
        }
    }

    /// Looks a register up: its row, its type. Ranged names (`%r<9>`) match with their number cut off.
    fn find_register(&self, name: &str) -> Option<(Reg, Ty)> {
        let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let (stem, index) = name.split_at(name.len() - digits);
        for (_, scope) in self.scopes.iter().rev() {
            if let Some(&(file, ty, start, None)) = scope.get(name) {
                return Some((Reg::new(file, start), ty));
            }
            if let (Some(&(file, ty, start, Some(count))), Ok(i)) = (scope.get(stem), index.parse::<u32>())
                && i < count
            {
                let each = if ty == Ty::B128 { 2 } else { 1 };
                return Some((Reg::new(file, start + i * each), ty));
            }
        }
        None
    }

    fn label(&self, name: &str) -> Result<u32, Fault> {
        let mut scope = self.scopes[self.scopes.len() - 1].0;
        loop {
            if let Some(&at) = self.labels.get(&(scope, name.to_string())) {
                return Ok(at);
            }
            if scope == 0 {
                return Err(Fault::new(FaultKind::Syntax, format!("no label `{name}` in scope")));
            }
            scope = self.parents[scope];
        }
    }

    fn symbol(&self, name: &str) -> Option<Symbol> {
        self.symbols.get(name).or_else(|| self.globals.get(name)).copied()
    }

    fn instruction(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        let mut inst = self.dispatch(raw)?;
        if let Some((name, negated)) = &raw.guard {
            let (reg, ty) = self
                .find_register(name)
                .ok_or_else(|| Fault::new(FaultKind::Syntax, format!("guard `{name}` is not declared")))?;
            if ty != Ty::Pred {
                return Err(Fault::new(FaultKind::Syntax, format!("guard `{name}` is no predicate")));
            }
            (inst.guard, inst.guard_not) = (reg, *negated);
        }
        if self.rows.iter().any(|&rows| rows >= Reg::MAX_ROWS) {
            return Err(Fault::unsupported(format!("more than {} registers", Reg::MAX_ROWS)));
        }
        Ok(inst)
    }

    fn dispatch(&mut self, raw: &RawInst) -> Result<Inst, Fault> {
        if let Some(inst) = self.arith(raw)? {
            return Ok(inst);
        }
        if let Some(inst) = self.memory(raw)? {
            return Ok(inst);
        }
        if let Some(inst) = self.sync(raw)? {
            return Ok(inst);
        }
        if let Some(inst) = self.matrix(raw)? {
            return Ok(inst);
        }
        Err(unknown(raw))
    }
}

/// The refusal of an instruction form.
fn unknown(raw: &RawInst) -> Fault {
    Fault::unsupported(format!("`{}` with {} operands", raw.opcode(), raw.operands.len()))
}

fn mentions(operand: &Operand, name: &str) -> bool {
    match operand {
        Operand::Name(n) => n == name,
        Operand::Vector(items) => items.iter().any(|o| mentions(o, name)),
        Operand::Address { base, .. } => mentions(base, name),
        Operand::Tensor { base, rest } => mentions(base, name) || rest.iter().any(|o| mentions(o, name)),
        _ => false,
    }
}
