//! Source lines of instructions, where the code object has debug information.

use gimli::{EndianSlice, LittleEndian};
use object::{Object, ObjectSection, read::elf::ElfFile64};

/// Address ranges and the source lines they came from, sorted by address.
#[derive(Debug, Default)]
pub(crate) struct LineTable {
    rows: Vec<(u64, Option<(u32, u32)>)>,
    files: Vec<String>,
}

impl LineTable {
    /// Reads `.debug_line`; a code object without one gives an empty table.
    pub(crate) fn read(file: &ElfFile64<'_>) -> Self {
        let mut table = Self::default();
        // Broken debug information must not keep a kernel from running: what could be read stays.
        let _ = table.fill(file);
        table.rows.sort_by_key(|row| row.0);
        table
    }

    fn fill(&mut self, file: &ElfFile64<'_>) -> gimli::Result<()> {
        let load = |id: gimli::SectionId| -> gimli::Result<EndianSlice<'_, LittleEndian>> {
            let data = file.section_by_name(id.name()).and_then(|s| s.data().ok()).unwrap_or(&[]);
            Ok(EndianSlice::new(data, LittleEndian))
        };
        let dwarf = gimli::Dwarf::load(load)?;
        let mut units = dwarf.units();
        while let Some(header) = units.next()? {
            let unit = dwarf.unit(header)?;
            let Some(program) = unit.line_program.clone() else { continue };
            let first_file = self.files.len() as u32;
            let mut rows = program.rows();
            while let Some((header, row)) = rows.next_row()? {
                if row.end_sequence() {
                    self.rows.push((row.address(), None));
                    continue;
                }
                let index = row.file_index() as u32;
                while self.files.len() as u32 <= first_file + index {
                    let i = self.files.len() as u64 - u64::from(first_file);
                    let text =
                        |attr| Some(dwarf.attr_string(&unit, attr).ok()?.to_string_lossy().into_owned());
                    let file = header.file(i);
                    let name = file.and_then(|f| text(f.path_name())).unwrap_or_default();
                    // Path as it was included. An absolute folder depends on the compiler's machine.
                    let folder = file.and_then(|f| text(f.directory(header)?)).unwrap_or_default();
                    let folder = folder.trim_start_matches("./");
                    let inside = !folder.is_empty() && !folder.starts_with(['/', '.']);
                    self.files.push(if inside { format!("{folder}/{name}") } else { name });
                }
                if let Some(line) = row.line() {
                    self.rows.push((row.address(), Some((first_file + index, line.get() as u32))));
                }
            }
        }
        Ok(())
    }

    /// `file:line` of the instruction at `address`.
    pub(crate) fn find(&self, address: u64) -> Option<String> {
        let after = self.rows.partition_point(|row| row.0 <= address);
        let (file, line) = self.rows.get(after.checked_sub(1)?)?.1?;
        Some(format!("{}:{line}", self.files[file as usize]))
    }
}
