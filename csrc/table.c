/* fusedmlp._launcher.Table: what to do with operands that look like those of an earlier call.
 *
 * Operands look alike where everything that a plan, its programs and the checks depend on is equal: kinds, shapes,
 * strides, dtypes, devices, alignment to 16 bytes, which of two weights lies first in memory, the stream, whether
 * gradients are recorded and for which operands, and how products in float32 are computed.
 */

#include "launcher.h"

#include <string.h>

enum { BUCKETS = 256, MAX_WORDS = 24 * MAX_OPERANDS, MAX_DIMENSIONS = 8 };

typedef struct Entry {
    struct Entry *next;
    PyObject *value;
    int bound; /* to its stream: not to be used inside a graph's capture */
    uint32_t words;
    uint64_t hash, look[];
} Entry;

typedef struct {
    PyObject_HEAD
    atomic_flag lock;
    int count, pair; /* the first of the two operands whose order in memory counts */
    Entry *buckets[BUCKETS];
} Table;

typedef struct {
    CUstream stream;
    int cuda, device; /* whether the first operand is on a CUDA device, and on which */
    uint64_t addresses[MAX_OPERANDS];
    uint64_t hash;
    uint32_t words;
    uint64_t look[MAX_WORDS];
} Look;

static PyObject *name_requires_grad;

static void lock(Table *table) {
    while (atomic_flag_test_and_set_explicit(&table->lock, memory_order_acquire))
        ;
}

static void unlock(Table *table) { atomic_flag_clear_explicit(&table->lock, memory_order_release); }

/* ------------------------------------------------------------------------------------------------ a look */

static int needs_gradient(PyObject *tensor) {
    PyObject *answer = PyObject_GetAttr(tensor, name_requires_grad);
    int yes = answer == Py_True;
    if (!answer)
        return -1;
    Py_DECREF(answer);
    return yes;
}

/* 2: products in float32 are as by "ieee"; 4: by another way; -1 with an exception. */
static int precision_of(const DLTensor *view) {
    if (view->dtype.code != 2 || view->dtype.bits != 32) /* kDLFloat */
        return 0;
    PyObject *name = PyObject_CallObject(torch.precision, NULL);
    if (!name)
        return -1;
    int found = PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, "ieee") ? 2 : 4;
    Py_DECREF(name);
    return found;
}

/* Which of two tensors lies first, and whether they are too far apart for one tensor map (driver API,
 * cuTensorMapEncodeTiled: strides below 2^40 bytes). */
static uint64_t relation(uint64_t a, uint64_t b) {
    uint64_t distance = a < b ? b - a : a - b;
    return (uint64_t)(a < b) | (uint64_t)(distance == 0) << 1 | (uint64_t)(distance >> 40 != 0) << 2;
}

/* 1 with the look of operands, 0 where they are not for a table, -1 with an exception. */
static int look_at(PyObject *const *operands, Py_ssize_t count, int pair, Look *look) {
    uint32_t n = 3, flags = 0;
    int gradients = torch_ask(torch.grad_enabled);
    if (gradients < 0)
        return -1;
    if (count < 1 || count > MAX_OPERANDS || operands[0] == Py_None) /* the first says device, stream and precision */
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        DLTensor view;
        if (operands[i] == Py_None) {
            look->addresses[i] = 0;
            look->look[n++] = UINT64_MAX;
            continue;
        }
        if (!torch_view(operands[i], &view) || view.ndim > MAX_DIMENSIONS)
            return 0;
        uint64_t address = (uint64_t)(uintptr_t)view.data;
        look->addresses[i] = address;
        look->look[n++] = (uint64_t)(uint32_t)view.ndim | (address & 15) << 8 | (uint64_t)view.dtype.code << 16 |
                          (uint64_t)view.dtype.bits << 24 | (uint64_t)(uint16_t)view.device.type << 32 |
                          (uint64_t)(uint16_t)view.device.id << 48;
        for (int32_t d = 0; d < view.ndim; d++) {
            look->look[n++] = (uint64_t)view.shape[d];
            look->look[n++] = (uint64_t)view.strides[d];
        }
        if (gradients) {
            int needed = needs_gradient(operands[i]);
            if (needed < 0)
                return -1;
            flags |= (uint32_t)needed << (8 + i);
        }
        if (!i) {
            int precision = precision_of(&view);
            if (precision < 0)
                return -1;
            flags |= (uint32_t)precision;
            look->cuda = view.device.type == DLPACK_CUDA;
            look->device = view.device.id;
            if (torch_stream(&view, &look->stream))
                return 0;
        }
    }
    look->look[0] = flags;
    look->look[1] = (uint64_t)(uintptr_t)look->stream;
    look->look[2] = pair >= 0 && count > pair + 1 ? relation(look->addresses[pair], look->addresses[pair + 1]) : 0;
    look->words = n;
    uint64_t hash = 1469598103934665603u; /* FNV-1a, by words */
    for (uint32_t i = 0; i < n; i++)
        hash = (hash ^ look->look[i]) * 1099511628211u;
    look->hash = hash ^ hash >> 32;
    return 1;
}

/* ------------------------------------------------------------------------------------------------ the table */

static Entry *find(const Table *table, const Look *look) {
    Entry *entry = table->buckets[look->hash % BUCKETS];
    while (entry && (entry->hash != look->hash || entry->words != look->words ||
                     memcmp(entry->look, look->look, look->words * sizeof *look->look)))
        entry = entry->next;
    return entry;
}

/* Takes every entry out; they are freed without the lock, since that may run any code. */
static void clear(Table *table) {
    Entry *all = NULL;
    lock(table);
    for (int i = 0; i < BUCKETS; i++)
        while (table->buckets[i]) {
            Entry *entry = table->buckets[i];
            table->buckets[i] = entry->next;
            entry->next = all;
            all = entry;
        }
    table->count = 0;
    unlock(table);
    while (all) {
        Entry *entry = all;
        all = entry->next;
        Py_DECREF(entry->value);
        PyMem_Free(entry);
    }
}

static int captures(const Look *look) {
    int status = 0;
    return look->cuda && driver.library && (driver.is_capturing(look->stream, &status) || status);
}

/* Whether the operands' device is the current one: PyTorch's allocator works on that. */
static int at_home(const Look *look) {
    CUdevice current;
    return !look->cuda || (driver.library && !driver.context_device(&current) && current == look->device);
}

static PyObject *serve(Table *table, PyObject *const *operands, Py_ssize_t count) {
    Look look;
    if (!table->count)
        Py_RETURN_NONE;
    int quiet = torch_quiet();
    if (quiet == 1)
        quiet = look_at(operands, count, table->pair, &look);
    if (quiet < 0)
        return NULL;
    if (!quiet)
        Py_RETURN_NONE;
    lock(table);
    Entry *entry = find(table, &look);
    PyObject *value = entry ? entry->value : NULL;
    int bound = entry ? entry->bound : 0;
    Py_XINCREF(value);
    unlock(table);
    if (!value)
        Py_RETURN_NONE;
    PyObject *result;
    if ((bound && captures(&look)) || !at_home(&look)) {
        Py_INCREF(Py_None);
        result = Py_None;
    } else if (Py_TYPE(value) != program_type) {
        PyObject *arguments = PyTuple_New(count);
        for (Py_ssize_t i = 0; arguments && i < count; i++) {
            Py_INCREF(operands[i]);
            PyTuple_SetItem(arguments, i, operands[i]);
        }
        result = arguments ? PyObject_Call(value, arguments, NULL) : NULL;
        Py_XDECREF(arguments);
    } else {
        result = program_run(value, operands, look.addresses, look.stream);
    }
    Py_DECREF(value);
    return result;
}

static PyObject *table_call(PyObject *self, PyObject *const *operands, Py_ssize_t count) {
    return serve((Table *)self, operands, count);
}

/* call_linears(children, names, x) */
static PyObject *table_call_linears(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    PyObject *operands[MAX_OPERANDS + 1];
    Py_ssize_t layers = count == 3 && PyTuple_Check(args[1]) ? PyTuple_Size(args[1]) : -1;
    if (layers < 0) {
        PyErr_SetString(PyExc_TypeError, "call_linears() takes a dict of modules, a tuple of names and x");
        return NULL;
    }
    if (!((Table *)self)->count || 1 + 2 * layers > MAX_OPERANDS || !torch_linears(args[0], args[1], operands + 1))
        Py_RETURN_NONE;
    operands[0] = args[2];
    for (Py_ssize_t i = 1; i <= 2 * layers; i++)
        Py_INCREF(operands[i]); /* a callable may take them out of their modules */
    PyObject *result = serve((Table *)self, operands, 1 + 2 * layers);
    for (Py_ssize_t i = 1; i <= 2 * layers; i++)
        Py_DECREF(operands[i]);
    return result;
}

/* add(value, bound, *operands) */
static PyObject *table_add(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Table *table = (Table *)self;
    Look look;
    if (count < 3 || !torch.exchange) {
        PyErr_SetString(PyExc_TypeError, "add() takes a value, a flag and at least one operand, after connect()");
        return NULL;
    }
    int bound = PyObject_IsTrue(args[1]);
    if (bound < 0)
        return NULL;
    if (Py_TYPE(args[0]) == program_type ? program_inputs(args[0]) != count - 2 : !PyCallable_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a value must be callable, or a Program that takes these operands");
        return NULL;
    }
    int suits = look_at(args + 2, count - 2, table->pair, &look);
    if (suits < 0)
        return NULL;
    if (!suits)
        Py_RETURN_FALSE;
    if (table->count >= MAX_ENTRIES)
        clear(table);
    Entry *entry = PyMem_Malloc(sizeof(Entry) + look.words * sizeof(uint64_t));
    if (!entry)
        return PyErr_NoMemory();
    Py_INCREF(args[0]);
    entry->value = args[0];
    entry->bound = bound;
    entry->words = look.words;
    entry->hash = look.hash;
    memcpy(entry->look, look.look, look.words * sizeof(uint64_t));
    lock(table);
    Entry *known = find(table, &look); /* another thread's, or one to replace */
    PyObject *old = NULL;
    if (known) {
        old = known->value;
        known->value = entry->value;
        known->bound = bound;
    } else {
        entry->next = table->buckets[look.hash % BUCKETS];
        table->buckets[look.hash % BUCKETS] = entry;
        table->count++;
    }
    unlock(table);
    if (known)
        PyMem_Free(entry);
    Py_XDECREF(old);
    Py_RETURN_TRUE;
}

static PyObject *table_clear(PyObject *self, PyObject *unused) {
    (void)unused;
    clear((Table *)self);
    Py_RETURN_NONE;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    int pair;
    if (!PyArg_ParseTuple(args, "i:Table", &pair) || (keywords && PyDict_Size(keywords)) || pair < -1 ||
        pair >= MAX_OPERANDS - 1) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "Table(pair) takes one number from -1 to %d", (int)MAX_OPERANDS - 2);
        return NULL;
    }
    if (!name_requires_grad && !(name_requires_grad = PyUnicode_InternFromString("requires_grad")))
        return NULL;
    Table *table = (Table *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (table) {
        atomic_flag_clear(&table->lock);
        table->pair = pair;
    }
    return (PyObject *)table;
}

static void table_dealloc(PyObject *self) {
    clear((Table *)self);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static Py_ssize_t table_length(PyObject *self) { return ((Table *)self)->count; }

PyDoc_STRVAR(call_doc,
             "call(*operands)\n--\n\n"
             "The result of what was added for operands that look like these, or None where nothing was, or where a mode, a\n"
             "hook or a capture stands in the way.");

PyDoc_STRVAR(call_linears_doc,
             "call_linears(children, names, x)\n--\n\n"
             "call(x, *weights, *biases) of the Linears of these names in a module's dict of children; None, too, where\n"
             "one of them is anything but a plain Linear, or hooks are registered for every module.");

PyDoc_STRVAR(add_doc,
             "add(value, bound, *operands)\n--\n\n"
             "Use a Program, or a callable that takes the operands, for operands that look like these. bound: not inside a\n"
             "capture. False where they are not plain tensors (or None, but for the first). A table that is full is emptied\n"
             "first.");

PyDoc_STRVAR(clear_doc, "clear()\n--\n\nForget everything.");

PyDoc_STRVAR(table_doc,
             "Table(pair)\n--\n\n"
             "What to do with operands that look like those of an earlier call. pair: the first of two operands of which it\n"
             "counts which lies first in memory, or -1.");

static PyMethodDef table_methods[] = {
    {"call", (PyCFunction)(void (*)(void))table_call, METH_FASTCALL, call_doc},
    {"call_linears", (PyCFunction)(void (*)(void))table_call_linears, METH_FASTCALL, call_linears_doc},
    {"add", (PyCFunction)(void (*)(void))table_add, METH_FASTCALL, add_doc},
    {"clear", table_clear, METH_NOARGS, clear_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, (void *)table_new},         {Py_tp_dealloc, (void *)table_dealloc},
    {Py_tp_methods, table_methods},         {Py_sq_length, (void *)table_length},
    {Py_tp_doc, (void *)table_doc},         {0, NULL},
};

PyType_Spec table_spec = {"fusedmlp._launcher.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, table_slots};
