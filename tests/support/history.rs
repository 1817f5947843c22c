//! What jobs write down, and what must be true of it.
//!
//! Each record is one line, appended with one write: the kind, the name, the term's token, the
//! process and the time, on a clock that is the same for all processes and counts suspend.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use leasehold::FencingToken;
use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since boot.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    u64::try_from(time.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap()
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub kind: String,
    pub name: String,
    pub token: FencingToken,
    pub process: u32,
    pub at: u64,
}

pub struct History {
    path: PathBuf,
    file: File,
}

impl History {
    pub fn open(path: &Path) -> History {
        let file = File::options().create(true).append(true).open(path).unwrap();
        History { path: path.to_owned(), file }
    }

    /// Appends a record of this process, at this moment.
    pub fn record(&self, kind: &str, name: &str, token: FencingToken) {
        let line = format!("{kind}\t{name}\t{token}\t{}\t{}\n", std::process::id(), now());
        (&self.file).write_all(line.as_bytes()).unwrap();
    }

    /// Every whole record so far. A process that was killed in the middle of one leaves no part.
    pub fn read(&self) -> Vec<Record> {
        let text = std::fs::read_to_string(&self.path).unwrap();
        text.lines().map(parse).collect()
    }
}

fn parse(line: &str) -> Record {
    let fields: Vec<&str> = line.split('\t').collect();
    let [kind, name, token, process, at] = fields[..] else { panic!("not a record: {line:?}") };
    Record {
        kind: kind.into(),
        name: name.into(),
        token: token.parse().unwrap(),
        process: process.parse().unwrap(),
        at: at.parse().unwrap(),
    }
}

/// A job from its start to its end, or to the death of its process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    pub name: String,
    pub token: FencingToken,
    pub process: u32,
    pub start: u64,
    /// `None` if it neither stopped nor was its process killed.
    pub stop: Option<u64>,
}

/// Puts records together to terms, by start. `killed` tells when processes died.
pub fn terms(records: &[Record], killed: &[(u32, u64)]) -> Vec<Term> {
    let mut terms = Vec::new();
    for record in records.iter().filter(|record| record.kind == "start") {
        let stop = records.iter().find(|other| {
            other.kind == "stop" && other.token == record.token && other.name == record.name
        });
        let died = killed.iter().find(|(process, _)| *process == record.process);
        let stop = stop.map(|stop| stop.at).or(died.map(|(_, at)| *at));
        terms.push(Term {
            name: record.name.clone(),
            token: record.token,
            process: record.process,
            start: record.start(),
            stop,
        });
    }
    terms.sort_by_key(|term| term.start);
    terms
}

impl Record {
    fn start(&self) -> u64 {
        self.at
    }
}

/// For how long two consecutive terms of one name ran at the same time, longest first.
pub fn overlaps(terms: &[Term]) -> Vec<(Duration, Term, Term)> {
    let mut by_name = BTreeMap::<&str, Vec<&Term>>::new();
    for term in terms {
        by_name.entry(&term.name).or_default().push(term);
    }
    let mut found = Vec::new();
    for terms in by_name.values() {
        for (at, earlier) in terms.iter().enumerate() {
            for later in &terms[at + 1..] {
                let end = earlier.stop.unwrap_or(u64::MAX).min(later.stop.unwrap_or(u64::MAX));
                if end > later.start {
                    let overlap = Duration::from_nanos(end - later.start);
                    found.push((overlap, (*earlier).clone(), (*later).clone()));
                }
            }
        }
    }
    found.sort_by_key(|(overlap, ..)| std::cmp::Reverse(*overlap));
    found
}

/// The first two terms of one name whose tokens do not grow.
pub fn tokens_out_of_order(terms: &[Term]) -> Option<(Term, Term)> {
    let mut last = BTreeMap::<&str, &Term>::new();
    for term in terms {
        if let Some(before) = last.insert(&term.name, term) {
            if before.token >= term.token {
                return Some((before.clone(), term.clone()));
            }
        }
    }
    None
}
