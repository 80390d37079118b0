//! What an operator is shown of the store itself: the audit, and records as they stand there.

use leasehold_core::request::{Audited, Finding, Inspected, RecordView};

use super::json::{self, Object};

pub fn audited(out: &mut Vec<u8>, page: &Audited) {
    let mut object = Object::new(out);
    object.time("at", page.at);
    object.num("records", page.records);
    object.num("jobs", page.jobs);
    object.num("entries", page.entries);
    object.num("quarantined", page.quarantined);
    json::array(object.key("findings"), &page.findings, finding);
    match &page.next {
        Some(next) => object.str("next", next),
        None => object.null("next"),
    }
    object.end();
}

fn finding(out: &mut Vec<u8>, finding: &Finding) {
    let mut object = Object::new(out);
    object.str("subject", &finding.subject);
    object.str("what", &finding.what);
    object.bool("repaired", finding.repaired);
    object.end();
}

pub fn inspected(out: &mut Vec<u8>, seen: &Inspected) {
    let mut object = Object::new(out);
    object.time("at", seen.at);
    json::array(object.key("records"), &seen.records, record);
    json::array(object.key("places"), &seen.places, |out, (index, score)| {
        let mut object = Object::new(out);
        object.str("index", index);
        object.num("score", *score);
        object.end();
    });
    json::array(object.key("counts"), &seen.counts, |out, (index, n)| {
        let mut object = Object::new(out);
        object.str("index", index);
        object.num("members", *n);
        object.end();
    });
    object.end();
}

fn record(out: &mut Vec<u8>, record: &RecordView) {
    let mut object = Object::new(out);
    object.str("key", &record.key);
    object.str("version", &format!("{:016x}", record.version));
    object.time("at", record.at);
    if let Some(at) = record.expires_at {
        object.time("expires_at", at);
    }
    object.num("bytes", record.len as u64);
    object.str("text", &record.text);
    object.end();
}
