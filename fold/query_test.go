package fold

import (
	"encoding/json"
	"fmt"
	"testing"

	"postrider/internal/record"
)

// Types come from whoever publishes on the topic; data stays the agent's bytes.
func TestShownJSONHasNoRawControlCharacters(t *testing.T) {
	s := Shown{Tenant: "t", Records: []ShownRecord{{Type: "a\x7f\u0080\u009f\u202e\u00a0é\x1b<", Data: []byte("\"\u009b\"")}}}
	got := string(s.AppendJSON(nil))
	want := `{"tenant":"t","node":"","run":"","branch":"","lsn":0,"records":[{"branch":"","lsn":0,"type":"a\u007f\u0080\u009f\u202e` +
		"\u00a0é" + `\u001b<","data":"` + "\u009b" + `"}]}`
	if got != want || !json.Valid([]byte(got)) {
		t.Errorf("%q, not %q", got, want)
	}
}

func TestRunNamesForCompletion(t *testing.T) {
	f := openNew(t, Options{})
	apply(t, f, ev("A", 1, 0), ev("A", 1, 0, func(r *record.Record) { r.Node, r.Key.Branch = "n2", ulid("B") }), ev("A", 1, 0, run("r2")), ev("A", 1, 0, run("s")))
	for prefix, want := range map[string]string{"": "[r1 r2 s]", "r": "[r1 r2]", "r2": "[r2]", "x": "[]"} {
		if got, err := f.RunNames(t.Context(), "acme", prefix, 10); err != nil || fmt.Sprint(got) != want {
			t.Errorf("%q: %v, %v", prefix, got, err)
		}
	}
}
