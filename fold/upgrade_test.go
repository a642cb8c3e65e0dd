package fold

import (
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"postrider/internal/sqlite"
)

// A fold's database of schema 1 goes on with what it counted.
func TestFoldGoesOnWithAnUpgradedDatabase(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fold.db")
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"fold-1.sql", "fold-1-rows.sql"} {
		text, err := os.ReadFile(filepath.Join("..", "testdata", "schema", name))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := db.ExecContext(t.Context(), string(text)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.ExecContext(t.Context(), "PRAGMA application_id = 0x50534644; PRAGMA user_version = 1; PRAGMA journal_mode = WAL"); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path, Options{Store: sqlite.Options{ReadOnly: true}}); !errors.Is(err, sqlite.ErrOlder) {
		t.Errorf("open for reading: %v", err)
	}
	f, err := Open(t.Context(), path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if f.name != "desk" || f.clientID != "postrider-fold-desk-abcd2345" {
		t.Errorf("fold %s, client %s", f.name, f.clientID)
	}
	v, err := f.Verify(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	v.Findings = nil
	if want := (Verification{Runs: 1, Records: 4, Duplicates: 2, Gaps: 1, Parked: 1, Conflicts: 1, Holes: 1, Malformed: 4}); !reflect.DeepEqual(*v, want) {
		t.Errorf("verified %+v, want %+v", *v, want)
	}
	s, err := f.Show(t.Context(), "d", "rewound", "")
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := s.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); !strings.Contains(got, `"branch":"01M8PPEWT2GDYW4QTDSG06GDCE","lsn":3,"records":[{`) || strings.Count(got, `"type"`) != 3 {
		t.Errorf("shown: %s", got)
	}
}
