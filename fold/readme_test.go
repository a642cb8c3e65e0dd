package fold

import (
	"bytes"
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"postrider/internal/record"
)

// TestPageForOtherLanguages: what README.md tells the authors of other consumers is what the code does.
func TestPageForOtherLanguages(t *testing.T) {
	b, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	section := func(name string) string {
		_, after, ok := strings.Cut(page, "\n## "+name+"\n")
		if !ok {
			t.Fatalf("the page has no section %q", name)
		}
		text, _, _ := strings.Cut(after, "\n## ")
		return text
	}

	t.Run("the example is what is on the wire", func(t *testing.T) {
		_, example, _ := strings.Cut(section("The envelope"), "```json\n")
		example, _, _ = strings.Cut(example, "\n```")
		want, err := os.ReadFile("../testdata/wire/event.json") // held to the codec by internal/record
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.ReplaceAll(example, ",\n", ","); got != string(want) {
			t.Errorf("the page has\n%s\nwant\n%s", got, want)
		}
	})

	t.Run("the attributes are those of an event with all of them", func(t *testing.T) {
		full, err := os.ReadFile("../testdata/wire/event-full.json")
		if err != nil {
			t.Fatal(err)
		}
		var e map[string]json.RawMessage
		if err := json.Unmarshal(full, &e); err != nil {
			t.Fatal(err)
		}
		want := sortedKeys(e)
		var got []string
		for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*`) \\|").FindAllStringSubmatch(section("The envelope"), -1) {
			for _, name := range strings.Split(row[1], ", ") {
				got = append(got, strings.Trim(name, "`"))
			}
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("the page has %q, want %q", got, want)
		}
	})

	t.Run("the topics are ours", func(t *testing.T) {
		topics := record.Topics{}
		part := "/" + strconv.Itoa(record.Partition("<tenant>", "<run>")) + "/"
		example, err := os.ReadFile("../testdata/wire/event.json")
		if err != nil {
			t.Fatal(err)
		}
		r, err := record.ParseCloudEvent(example)
		if err != nil {
			t.Fatal(err)
		}
		all := func(tenant string) string {
			return strings.TrimSuffix(topics.EventsFilters(tenant, []int{0})[0], "0/#") + "#"
		}
		want := []string{
			strings.Replace(record.Topics{Root: "<root>"}.Events("<tenant>", "<node>", "<run>"), part, "/<part>/", 1),
			topics.Of(&r), all(""), all("acme"), topics.EventsFilters("", []int{3})[0],
		}
		var got []string
		for _, m := range regexp.MustCompile(`[<\w>]+/v1/[^\x60' ]*`).FindAllString(page, -1) {
			if !slices.Contains(want, m) {
				t.Errorf("the page has topic %q, which is none of %q", m, want)
			}
			got = append(got, m)
		}
		for _, w := range want {
			if !slices.Contains(got, w) {
				t.Errorf("the page lacks topic %q", w)
			}
		}
		if !strings.Contains(page, "0 to "+strconv.Itoa(record.Partitions-1)) || !strings.Contains(page, "modulo "+strconv.Itoa(record.Partitions)) {
			t.Error("the page has another number of partitions")
		}
		if !strings.Contains(page, "is `"+record.DefaultRoot+"` unless") {
			t.Error("the page has another root")
		}
	})

	t.Run("the rule", func(t *testing.T) {
		rule, _, _ := strings.Cut(strings.TrimSpace(section("The fold rule")), "\n\n")
		if n := strings.Count(rule, "\n") + 1; n > 20 {
			t.Errorf("the rule has %d lines, 20 are promised", n)
		}
		opened := (&record.BranchOpened{}).AppendData(nil)
		for _, value := range []string{`:""`, ":0"} {
			opened = bytes.ReplaceAll(opened, []byte(value), nil)
		}
		for _, want := range []string{record.TypeRecordDead, record.TypeBranchOpened, string(opened)} {
			if !strings.Contains(rule, "`"+want+"`") {
				t.Errorf("the rule lacks %s", want)
			}
		}
	})

	t.Run("the files it names", func(t *testing.T) {
		for _, name := range regexp.MustCompile(`testdata/[\w./]*\w`).FindAllString(page, -1) {
			if _, err := os.Stat("../" + name); err != nil {
				t.Error(err)
			}
		}
	})
}
