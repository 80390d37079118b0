//! The checker checked on whole runs. Goal: an oracle that is told of a run with one place wrong objects, by the
//! promise that it concerns, unless the wrong could be true. Method: real seeds, each kind of corruption at places
//! all over them.

use sim::corrupt::{self, Kind};

#[test]
fn what_is_wrong_is_objected_to() {
    let tried = corrupt::seeds(0, 20, 1, 2, &|_| ());
    println!("{}", corrupt::table(&tried));
    let missed: Vec<_> = tried.iter().filter(|t| t.missed()).collect();
    assert!(missed.is_empty(), "{missed:#?}");
    for kind in Kind::ALL {
        let noticed = tried.iter().filter(|t| t.kind == *kind && t.by.is_some()).count();
        assert!(noticed >= 3, "{}: {noticed}", kind.text());
    }
}
