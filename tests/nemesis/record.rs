//! The history that all replicas append to, and what is read back from it.
//!
//! One record is one line, appended with one write. Times are nanoseconds since boot, the same for
//! all processes, and go on while the machine is suspended. A record's time is taken *before* what it
//! tells of, so a process that is stopped in between claims nothing for the time of the stop.

use std::fs::File;
use std::io::Write;
use std::path::Path;

pub use crate::support::history::now;

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A job begins.
    Start,
    /// A side effect, and whether the lease said that it was held at that moment.
    Work,
    /// How many guarded rows of earlier terms there are, as the new job sees it.
    Seen,
    /// The job has been told to stop.
    Told,
    /// The job returns.
    Stop,
    /// `Locker::close` returned; the value is how long it took, in nanoseconds.
    Closed,
}

const KINDS: [(Kind, &str); 6] = [
    (Kind::Start, "start"),
    (Kind::Work, "work"),
    (Kind::Seen, "seen"),
    (Kind::Told, "told"),
    (Kind::Stop, "stop"),
    (Kind::Closed, "closed"),
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub at: u64,
    pub slot: usize,
    pub process: u32,
    pub kind: Kind,
    pub name: usize,
    pub token: i64,
    pub held: bool,
    /// A number, or for [`Kind::Told`] 1 if the reason was a loss.
    pub value: u64,
}

pub struct Writer {
    file: File,
    slot: usize,
}

impl Writer {
    pub fn open(path: &Path, slot: usize) -> Writer {
        let file = File::options().create(true).append(true).open(path).unwrap();
        Writer { file, slot }
    }

    pub fn write(&self, at: u64, kind: Kind, name: usize, token: i64, held: bool, value: u64) {
        let kind = KINDS.iter().find(|(each, _)| *each == kind).unwrap().1;
        let (slot, process) = (self.slot, std::process::id());
        let held = u8::from(held);
        let line =
            format!("{at}\t{slot}\t{process}\t{kind}\t{name}\t{token}\t{held}\t{value}\t.\n");
        (&self.file).write_all(line.as_bytes()).unwrap();
    }
}

/// Every record, and how many lines are none: a process that is killed in the middle of a write may
/// leave a part, which spoils the record that follows as well.
pub fn read(path: &Path) -> (Vec<Record>, usize) {
    let text = std::fs::read_to_string(path).unwrap();
    let mut broken = 0;
    let mut records = Vec::new();
    for line in text.lines() {
        match parse(line) {
            Some(record) => records.push(record),
            None => broken += 1,
        }
    }
    (records, broken)
}

fn parse(line: &str) -> Option<Record> {
    let fields: Vec<&str> = line.split('\t').collect();
    let [at, slot, process, kind, name, token, held, value, "."] = fields[..] else { return None };
    Some(Record {
        at: at.parse().ok()?,
        slot: slot.parse().ok()?,
        process: process.parse().ok()?,
        kind: KINDS.iter().find(|(_, text)| *text == kind)?.0,
        name: name.parse().ok()?,
        token: token.parse().ok()?,
        held: held == "1",
        value: value.parse().ok()?,
    })
}
