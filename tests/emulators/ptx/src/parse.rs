//! PTX text to [`ast`](crate::ast). PTX ISA, chapters 4 and 11.

use crate::ast::{Func, Module, Operand, Param, RawInst, Space, Stmt, Ty, Var};
use crate::fault::Fault;
use crate::lex::{Spanned, Token, lex};

/// Parses a whole module.
pub(crate) fn parse(text: &str) -> Result<Module, Fault> {
    let mut p = Parser { tokens: lex(text)?, at: 0, source_line: 0 };
    let mut module = Module::default();
    while let Some(word) = p.peek_word() {
        match word.as_str() {
            ".version" => module.version = p.rest_of_line(),
            ".target" => module.target = p.rest_of_line(),
            ".address_size" | ".file" | ".loc" => {
                p.rest_of_line();
            }
            ".section" => p.skip_braces()?,
            ".pragma" | ".alias" => p.skip_statement(),
            ".visible" | ".weak" | ".extern" | ".common" | ".entry" | ".func" | ".global" | ".const"
            | ".shared" => {
                p.module_item(&mut module)?;
            }
            _ => return Err(p.error(format!("unexpected `{word}` at module scope"))),
        }
    }
    if p.at < p.tokens.len() {
        return Err(p.error("unexpected token at module scope"));
    }
    Ok(module)
}

struct Parser {
    tokens: Vec<Spanned>,
    at: usize,
    source_line: u32,
}

impl Parser {
    fn line(&self) -> u32 {
        self.tokens.get(self.at.min(self.tokens.len().saturating_sub(1))).map_or(0, |t| t.line)
    }

    fn error(&self, text: impl Into<String>) -> Fault {
        Fault::syntax(self.line(), text)
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|t| &t.token)
    }

    fn peek_word(&self) -> Option<String> {
        match self.peek() {
            Some(Token::Word(word)) => Some(word.clone()),
            _ => None,
        }
    }

    fn is(&self, c: char) -> bool {
        self.peek() == Some(&Token::Punct(c))
    }

    fn take(&mut self, c: char) -> bool {
        let found = self.is(c);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, c: char) -> Result<(), Fault> {
        if self.take(c) {
            Ok(())
        } else {
            Err(self.error(format!("expected `{c}`, found {:?}", self.peek())))
        }
    }

    fn word(&mut self) -> Result<String, Fault> {
        let word = self
            .peek_word()
            .ok_or_else(|| self.error(format!("expected a name, found {:?}", self.peek())))?;
        self.at += 1;
        Ok(word)
    }

    fn integer(&mut self) -> Result<u64, Fault> {
        let negative = self.take('-');
        match self.peek() {
            Some(&Token::Int(value)) => {
                self.at += 1;
                Ok(if negative { value.wrapping_neg() } else { value })
            }
            other => Err(self.error(format!("expected an integer, found {other:?}"))),
        }
    }

    /// Directives that end with their line: returns what follows the first word.
    fn rest_of_line(&mut self) -> String {
        let line = self.line();
        self.at += 1;
        let mut out = String::new();
        while self.at < self.tokens.len() && self.tokens[self.at].line == line {
            match &self.tokens[self.at].token {
                Token::Word(w) | Token::Text(w) => out.push_str(w),
                Token::Int(v) => out.push_str(&v.to_string()),
                Token::Float(v) => out.push_str(&format!("{v:?}")),
                Token::Punct(c) => out.push(*c),
                Token::F32(_) | Token::F64(_) => {}
            }
            self.at += 1;
        }
        out
    }

    fn skip_statement(&mut self) {
        while self.at < self.tokens.len() && !self.take(';') {
            self.at += 1;
        }
    }

    fn skip_braces(&mut self) -> Result<(), Fault> {
        while !self.is('{') {
            self.at += 1;
            if self.at >= self.tokens.len() {
                return Err(self.error("expected `{`"));
            }
        }
        let mut depth = 0;
        loop {
            if self.is('{') {
                depth += 1;
            } else if self.is('}') {
                depth -= 1;
            }
            self.at += 1;
            if depth == 0 {
                return Ok(());
            }
            if self.at >= self.tokens.len() {
                return Err(self.error("unclosed `{`"));
            }
        }
    }

    fn module_item(&mut self, module: &mut Module) -> Result<(), Fault> {
        let mut external = false;
        while let Some(word) = self.peek_word() {
            match word.as_str() {
                ".visible" | ".weak" | ".common" => self.at += 1,
                ".extern" => {
                    external = true;
                    self.at += 1;
                }
                ".entry" => {
                    self.at += 1;
                    let kernel = self.kernel()?;
                    module.kernels.push(kernel);
                    return Ok(());
                }
                ".func" => return self.skip_function(),
                _ => {
                    let vars = self.variables(external)?;
                    module.vars.extend(vars);
                    return Ok(());
                }
            }
        }
        Err(self.error("expected a declaration"))
    }

    /// Device functions are not interpreted (NVRTC inlines ours); a `call` to one is refused by line.
    fn skip_function(&mut self) -> Result<(), Fault> {
        while !self.is('{') && !self.is(';') {
            self.at += 1;
            if self.at >= self.tokens.len() {
                return Err(self.error("unfinished .func"));
            }
        }
        if self.take(';') { Ok(()) } else { self.skip_braces() }
    }

    fn kernel(&mut self) -> Result<Func, Fault> {
        let mut func = Func { name: self.word()?, ..Func::default() };
        if self.take('(') {
            let mut offset = 0;
            while !self.take(')') {
                let (param, end) = self.parameter(offset)?;
                func.params.push(param);
                offset = end;
                self.take(',');
            }
        }
        while !self.is('{') {
            let word = self.word()?;
            match word.as_str() {
                ".maxntid" => func.max_threads = Some(self.triple()?.iter().product()),
                ".reqntid" => func.required_block = Some(self.triple()?),
                ".reqnctapercluster" => func.cluster = Some(self.triple()?),
                ".maxclusterrank" | ".minnctapersm" => {
                    self.integer()?;
                }
                ".maxnreg" => func.max_registers = Some(self.integer()? as u32),
                ".explicitcluster" | ".noreturn" | ".blocksareclusters" => {}
                ".pragma" => self.skip_statement(),
                _ => return Err(self.error(format!("unknown kernel directive `{word}`"))),
            }
        }
        self.at += 1;
        func.body = self.body()?;
        Ok(func)
    }

    fn triple(&mut self) -> Result<[u32; 3], Fault> {
        let mut out = [self.integer()? as u32, 1, 1];
        for slot in &mut out[1..] {
            if self.take(',') {
                *slot = self.integer()? as u32;
            }
        }
        Ok(out)
    }

    fn parameter(&mut self, offset: u32) -> Result<(Param, u32), Fault> {
        let (mut align, mut ty) = (0, None);
        loop {
            let word = self.word()?;
            match word.as_str() {
                ".param" | ".ptr" | ".global" | ".const" | ".shared" | ".local" => {}
                ".align" => align = self.integer()? as u32,
                _ => {
                    if let Some(found) = word.strip_prefix('.').and_then(Ty::parse) {
                        ty = Some(found);
                        continue;
                    }
                    let ty = ty.ok_or_else(|| self.error("parameter without a type"))?;
                    let count = if self.take('[') {
                        let n = self.integer()? as u32;
                        self.expect(']')?;
                        n
                    } else {
                        // `.ptr .align 16` describes the pointer's target, not the parameter.
                        align = 0;
                        1
                    };
                    let bytes = ty.bytes() * count;
                    let offset = offset.next_multiple_of(align.max(ty.bytes()).max(1));
                    return Ok((Param { name: word, bytes, offset }, offset + bytes));
                }
            }
        }
    }

    /// `.shared .align 16 .b8 name[64];`, perhaps several names, perhaps with an initialiser.
    fn variables(&mut self, external: bool) -> Result<Vec<Var>, Fault> {
        let (mut space, mut align, mut ty, mut lanes) = (Space::Global, 0, None, 1);
        let mut out = Vec::new();
        loop {
            let word = self.word()?;
            match word.as_str() {
                ".global" => space = Space::Global,
                ".shared" => space = Space::Shared,
                ".local" => space = Space::Local,
                ".const" => space = Space::Const,
                ".param" => space = Space::Param,
                ".attribute" => {
                    while !self.take(')') {
                        self.at += 1;
                    }
                }
                ".align" => align = self.integer()? as u32,
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                _ => {
                    if let Some(found) = word.strip_prefix('.').and_then(Ty::parse) {
                        ty = Some(found);
                        continue;
                    }
                    let ty = ty.ok_or_else(|| self.error(format!("`{word}` has no type")))?;
                    let mut var = Var {
                        space,
                        name: word,
                        align: align.max(ty.bytes() * lanes),
                        bytes: u64::from(ty.bytes() * lanes),
                        init: Vec::new(),
                        dynamic: false,
                    };
                    while self.take('[') {
                        if self.is(']') {
                            var.dynamic = external;
                            var.bytes = 0;
                        } else {
                            var.bytes *= self.integer()?;
                        }
                        self.expect(']')?;
                    }
                    if self.take('=') {
                        self.initialiser(ty, &mut var.init)?;
                        var.bytes = var.bytes.max(var.init.len() as u64);
                    }
                    out.push(var);
                    if !self.take(',') {
                        self.expect(';')?;
                        return Ok(out);
                    }
                }
            }
        }
    }

    fn initialiser(&mut self, ty: Ty, out: &mut Vec<u8>) -> Result<(), Fault> {
        if self.take('{') {
            while !self.take('}') {
                self.initialiser(ty, out)?;
                self.take(',');
            }
            return Ok(());
        }
        let operand = self.operand()?;
        let size = ty.bytes() as usize;
        let value = match operand {
            Operand::Int(v) | Operand::F64(v) => v,
            Operand::F32(v) => u64::from(v),
            Operand::Float(v) if ty == Ty::F64 => v.to_bits(),
            Operand::Float(v) => u64::from((v as f32).to_bits()),
            other => return Err(self.error(format!("initialiser {other:?} is not supported"))),
        };
        out.extend_from_slice(&value.to_le_bytes()[..size]);
        Ok(())
    }

    fn body(&mut self) -> Result<Vec<Stmt>, Fault> {
        let mut out = Vec::new();
        let mut depth = 0;
        loop {
            match self.peek() {
                None => return Err(self.error("unclosed kernel body")),
                Some(Token::Punct('{')) => {
                    self.at += 1;
                    depth += 1;
                    out.push(Stmt::Open);
                }
                Some(Token::Punct('}')) => {
                    self.at += 1;
                    if depth == 0 {
                        return Ok(out);
                    }
                    depth -= 1;
                    out.push(Stmt::Close);
                }
                Some(Token::Punct(';')) => self.at += 1,
                Some(Token::Punct('@')) => out.push(Stmt::Inst(self.instruction()?)),
                Some(Token::Word(word)) => {
                    let word = word.clone();
                    if self.tokens.get(self.at + 1).is_some_and(|t| t.token == Token::Punct(':')) {
                        self.at += 2;
                        if self.peek_word().as_deref() == Some(".branchtargets") {
                            self.at += 1;
                            let mut labels = vec![self.word()?];
                            while self.take(',') {
                                labels.push(self.word()?);
                            }
                            self.expect(';')?;
                            out.push(Stmt::Targets { name: word, labels });
                        } else {
                            out.push(Stmt::Label(word));
                        }
                        continue;
                    }
                    match word.as_str() {
                        ".loc" => self.location(),
                        ".pragma" => self.skip_statement(),
                        ".file" => {
                            self.rest_of_line();
                        }
                        ".reg" => self.registers(&mut out)?,
                        w if w.starts_with('.') => {
                            out.extend(self.variables(false)?.into_iter().map(Stmt::Var));
                        }
                        _ => out.push(Stmt::Inst(self.instruction()?)),
                    }
                }
                Some(other) => return Err(self.error(format!("unexpected {other:?}"))),
            }
        }
    }

    fn location(&mut self) {
        if let Some(Token::Int(line)) = self.tokens.get(self.at + 2).map(|t| &t.token) {
            self.source_line = *line as u32;
        }
        self.rest_of_line();
    }

    fn registers(&mut self, out: &mut Vec<Stmt>) -> Result<(), Fault> {
        self.at += 1;
        let word = self.word()?;
        let ty = word.strip_prefix('.').and_then(Ty::parse);
        let ty = ty.ok_or_else(|| self.error(format!("registers of type `{word}` are not supported")))?;
        loop {
            let name = self.word()?;
            let count = if self.take('<') {
                let n = self.integer()? as u32;
                self.expect('>')?;
                Some(n)
            } else {
                None
            };
            out.push(Stmt::Regs { ty, name, count });
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    fn instruction(&mut self) -> Result<RawInst, Fault> {
        let line = self.line();
        let guard = if self.take('@') {
            let negated = self.take('!');
            Some((self.word()?, negated))
        } else {
            None
        };
        let words: Vec<String> = self.word()?.split('.').map(str::to_string).collect();
        let mut operands = Vec::new();
        while !self.take(';') {
            if self.take('(') {
                while !self.take(')') {
                    operands.push(self.operand()?);
                    self.take(',');
                }
            } else {
                operands.push(self.operand()?);
            }
            if !self.take(',') && !self.is(';') {
                return Err(self.error(format!("expected `,` or `;`, found {:?}", self.peek())));
            }
        }
        Ok(RawInst { guard, words, operands, line, source_line: self.source_line })
    }

    fn operand(&mut self) -> Result<Operand, Fault> {
        let negative = self.take('-');
        let token = self.peek().cloned().ok_or_else(|| self.error("expected an operand"))?;
        self.at += 1;
        Ok(match token {
            Token::Int(v) => Operand::Int(if negative { v.wrapping_neg() } else { v }),
            Token::F32(v) => Operand::F32(if negative { v ^ 1 << 31 } else { v }),
            Token::F64(v) => Operand::F64(if negative { v ^ 1 << 63 } else { v }),
            Token::Float(v) => Operand::Float(if negative { -v } else { v }),
            Token::Punct('!') => Operand::Not(Box::new(self.operand()?)),
            Token::Punct('{') => {
                let mut items = Vec::new();
                while !self.take('}') {
                    items.push(self.operand()?);
                    self.take(',');
                }
                Operand::Vector(items)
            }
            Token::Punct('[') => self.address()?,
            Token::Word(name) => {
                if name == "_" && !self.is('|') {
                    Operand::Sink
                } else if self.take('|') {
                    let second = self.operand()?;
                    let first = if name == "_" { Operand::Sink } else { Operand::Name(name) };
                    Operand::Pair(Box::new(first), Box::new(second))
                } else {
                    Operand::Name(name)
                }
            }
            other => return Err(self.error(format!("{other:?} is no operand"))),
        })
    }

    fn address(&mut self) -> Result<Operand, Fault> {
        let base = Box::new(self.operand()?);
        let mut offset = 0i64;
        while self.is('+') || self.is('-') {
            let negative = self.take('-');
            self.take('+');
            let value = self.integer()? as i64;
            offset = if negative { offset.wrapping_sub(value) } else { offset.wrapping_add(value) };
        }
        if self.take(']') {
            return Ok(Operand::Address { base, offset });
        }
        let mut rest = Vec::new();
        while self.take(',') {
            rest.push(self.operand()?);
        }
        self.expect(']')?;
        Ok(Operand::Tensor { base, rest })
    }
}
