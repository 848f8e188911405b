//! Run of each mutant on the trials that reach its site, the cheapest first, until one fails.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;

use crate::mutant::Mutant;
use crate::trial::{Ended, Place, Trial};

/// Number of trials that run in a process each, before the rest run in groups.
const ALONE: usize = 4;
/// Trials that take longer than this run after the others, since they would leave no time for many short ones.
const FIRST_SECONDS: f64 = 1.0;
/// Approximate seconds of a group of trials.
const GROUP_SECONDS: f64 = 5.0;

/// Fates of mutants, by the mutants' names.
pub(crate) struct Fates {
    pub(crate) of: BTreeMap<String, String>,
    /// Hashes of the files' texts.
    texts: BTreeMap<String, u64>,
}

impl Fates {
    pub(crate) fn new(texts: BTreeMap<String, u64>) -> Self {
        Self { of: BTreeMap::new(), texts }
    }

    pub(crate) fn text(&self, file: &str) -> u64 {
        self.texts.get(file).copied().unwrap_or_default()
    }
}

/// Tries those of `mutants` (given by number) whose fate is unknown, each with trials of at most `within` seconds
/// together. Each fate is appended to `file` at once.
pub(crate) fn run(
    mutants: &[(u32, &Mutant)],
    trials: &[Trial],
    fates: &mut Fates,
    file: &Path,
    scratch: &Path,
    (jobs, within): (usize, f64),
) -> Result<(), String> {
    let open = std::fs::OpenOptions::new().create(true).append(true).open(file);
    let log = Mutex::new((open.map_err(|error| format!("{}: {error}", file.display()))?, fates));
    let pending: Vec<_> = {
        let known = &log.lock().expect("no thread yet").1;
        mutants.iter().copied().filter(|(_, mutant)| !known.of.contains_key(&mutant.name)).collect()
    };
    let count = pending.len();
    let queue = Mutex::new(pending.into_iter().enumerate());
    // Trials that last found a mutant in each file: neighbouring mutants are mostly found by the same trial.
    let finders: Mutex<BTreeMap<&str, Vec<usize>>> = Mutex::default();
    std::thread::scope(|scope| {
        for index in 0..jobs {
            let place = Place::new(scratch, index);
            let (queue, log, finders) = (&queue, &log, &finders);
            scope.spawn(move || {
                loop {
                    let Some((at, (number, mutant))) = queue.lock().expect("no thread panics").next() else {
                        break;
                    };
                    let last = finders.lock().expect("no thread panics").get(&*mutant.file).cloned();
                    let (fate, finder) = fate(number, trials, &last.unwrap_or_default(), &place, within);
                    if let Some(finder) = finder {
                        let mut finders = finders.lock().expect("no thread panics");
                        let here = finders.entry(&mutant.file).or_default();
                        here.retain(|trial| *trial != finder);
                        here.insert(0, finder);
                    }
                    let (file, fates) = &mut *log.lock().expect("no thread panics");
                    let written = writeln!(file, "{fate}\t{}\t{}", fates.text(&mutant.file), mutant.name);
                    if let Err(error) = written {
                        eprintln!("{error}");
                    }
                    eprintln!("{at}/{count} {fate}: {}", mutant.name);
                    fates.of.insert(mutant.name.clone(), fate);
                }
            });
        }
    });
    Ok(())
}

/// Fate of a mutant, with the trial that found it.
fn fate(
    number: u32,
    trials: &[Trial],
    last: &[usize],
    place: &Place,
    within: f64,
) -> (String, Option<usize>) {
    let reaching = |at: &usize| trials[*at].reach.contains(&number);
    let is_short = |at: &usize| trials[*at].seconds <= FIRST_SECONDS;
    let mut order: Vec<usize> = last.iter().copied().filter(is_short).filter(reaching).take(ALONE).collect();
    let others: Vec<usize> = (0..trials.len()).filter(reaching).filter(|at| !order.contains(at)).collect();
    order.extend(others);
    if order.is_empty() {
        return ("not reached".to_owned(), None);
    }
    let (alone, rest) = order.split_at(ALONE.min(order.len()));
    let mut groups: Vec<Vec<usize>> = alone.iter().map(|at| vec![*at]).collect();
    let mut open: Vec<Vec<usize>> = Vec::new();
    for &at in rest {
        let fits = |group: &&mut Vec<usize>| {
            let seconds: f64 = group.iter().map(|at| trials[*at].seconds).sum();
            trials[group[0]].goes_with(&trials[at]) && seconds < GROUP_SECONDS
        };
        match open.iter_mut().find(fits) {
            Some(group) => group.push(at),
            None => open.push(vec![at]),
        }
    }
    groups.extend(open);
    let mut spent = 0.0;
    for group in groups {
        let members: Vec<&Trial> = group.iter().map(|at| &trials[*at]).collect();
        let seconds: f64 = members.iter().map(|trial| trial.seconds).sum();
        if spent > 0.0 && spent + seconds > within {
            return ("outlives".to_owned(), None);
        }
        spent += seconds;
        let limit = (20.0 * seconds).ceil().max(10.0) as u64;
        match Trial::run(&members, ("SCHEMATA_MUTANT", number.to_string()), limit, place) {
            Ok(Ended::Well) => {}
            Ok(Ended::Badly) => return ("caught".to_owned(), Some(group[0])),
            Ok(Ended::Late) => return ("timeout".to_owned(), Some(group[0])),
            Err(error) => return (format!("not run ({error})"), None),
        }
    }
    ("survives".to_owned(), None)
}
